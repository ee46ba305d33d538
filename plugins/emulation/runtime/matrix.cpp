// Tensor-core instructions. Layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating
// point type", "... mma.m16n8k32" and "Warp-level matrix load instruction: ldmatrix"; g is a lane's
// groupID (lane / 4) and t its threadID_in_group (lane % 4).
#include <cuda_fp16.h>

#include <cstring>

#include "fault.hpp"
#include "scheduler.hpp"

namespace emulation {
namespace {

// `.aligned` instructions take the whole warp, exited lanes included.
void require_whole_warp(const Lanes& lanes) {
  if (lanes.active != ~0u)
    fail(lanes.first().site, "divergent warp", "executed by lanes 0x%08x, and it takes all 32",
         lanes.active);
}

// ---- ldmatrix ----
struct LoadSlot {
  uint16_t row[8];
  int matrices;
  bool transposed;
  uint32_t* registers;
};

void combine_ldmatrix(Lanes& lanes) {
  require_whole_warp(lanes);
  for (int l = 0; l < kLanes; ++l) {
    const auto& mine = lanes.slot<LoadSlot>(l);
    const int g = l / 4, t = l % 4;
    for (int m = 0; m < mine.matrices; ++m) {
      const auto element = [&](int row, int column) {
        return uint32_t{lanes.slot<LoadSlot>(m * 8 + row).row[column]};
      };
      mine.registers[m] = mine.transposed ? element(2 * t, g) | element(2 * t + 1, g) << 16
                                          : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
    }
  }
}

// ---- mma.sync ----
template <class Number>
struct MmaSlot {
  Number* d;
  const uint32_t *a, *b;
  const Number* c;
};

float half_at(const uint32_t* registers, int i) {
  __half_raw raw;
  raw.x = static_cast<uint16_t>(registers[i / 2] >> 16 * (i % 2));
  return __half2float(__half(raw));
}

int byte_at(const uint32_t* registers, int i) {
  return static_cast<int8_t>(registers[i / 4] >> 8 * (i % 4));
}

// Per: elements of a register; K: the depth of the product. Rows of A step by registers 0-1-0-1,
// its columns, like the rows of B, by registers 0 and 1, then 2 and 3.
template <class Number, int K, int Per, Number at(const uint32_t*, int)>
void combine_mma(Lanes& lanes) {
  require_whole_warp(lanes);
  Number a[16][K], b[K][8], d[kLanes][4];
  for (int l = 0; l < kLanes; ++l) {
    const auto& mine = lanes.slot<MmaSlot<Number>>(l);
    const int g = l / 4, t = l % 4;
    for (int i = 0; i < 4 * Per; ++i)
      a[g + i / Per % 2 * 8][t * Per + i % Per + i / (2 * Per) * (K / 2)] = at(mine.a, i);
    for (int i = 0; i < 2 * Per; ++i) b[t * Per + i % Per + i / Per * (K / 2)][g] = at(mine.b, i);
  }
  for (int l = 0; l < kLanes; ++l) {
    const auto& mine = lanes.slot<MmaSlot<Number>>(l);
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
      d[l][i] = mine.c[i];
      for (int k = 0; k < K; ++k) d[l][i] += a[row][k] * b[k][column];
    }
  }
  // Only now: a lane's d may be its own c.
  for (int l = 0; l < kLanes; ++l)
    for (int i = 0; i < 4; ++i) lanes.slot<MmaSlot<Number>>(l).d[i] = d[l][i];
}

// ---- wmma ----
struct WmmaSlot {
  WmmaShape shape;
  const void *a, *b, *c;
  void* d;
};

double get(const void* fragment, Element type, int i) {
  switch (type) {
    case Element::f16: return __half2float(static_cast<const __half*>(fragment)[i]);
    case Element::f32: return static_cast<const float*>(fragment)[i];
    case Element::s8: return static_cast<const int8_t*>(fragment)[i];
    case Element::u8: return static_cast<const uint8_t*>(fragment)[i];
    case Element::s32: return static_cast<const int32_t*>(fragment)[i];
  }
  return 0;
}

void put(void* fragment, Element type, int i, float v) {
  if (type == Element::f16)
    static_cast<__half*>(fragment)[i] = __float2half_rn(v);
  else
    static_cast<float*>(fragment)[i] = v;
}
void put(void* fragment, Element, int i, int v) { static_cast<int32_t*>(fragment)[i] = v; }

constexpr int kMostInputs = 32 * 16, kMostOutputs = 16 * 16;  // elements of a wmma tile

template <class Number>
void multiply(Lanes& lanes, const WmmaShape& shape) {
  Number a[kMostInputs], b[kMostInputs], d[kMostOutputs];
  const int per_a = shape.m * shape.k / kLanes, per_b = shape.k * shape.n / kLanes,
            per_d = shape.m * shape.n / kLanes;
  for (int l = 0; l < kLanes; ++l) {
    const auto& mine = lanes.slot<WmmaSlot>(l);
    for (int i = 0; i < per_a; ++i)
      a[l * per_a + i] = static_cast<Number>(get(mine.a, shape.input, i));
    for (int i = 0; i < per_b; ++i)
      b[l * per_b + i] = static_cast<Number>(get(mine.b, shape.input, i));
    for (int i = 0; i < per_d; ++i) d[l * per_d + i] = static_cast<Number>(get(mine.c, shape.c, i));
  }
  for (int row = 0; row < shape.m; ++row)
    for (int k = 0; k < shape.k; ++k)
      for (int column = 0; column < shape.n; ++column)
        d[row * shape.n + column] += a[row * shape.k + k] * b[k * shape.n + column];
  for (int l = 0; l < kLanes; ++l)
    for (int i = 0; i < per_d; ++i) put(lanes.slot<WmmaSlot>(l).d, shape.d, i, d[l * per_d + i]);
}

void combine_wmma(Lanes& lanes) {
  require_whole_warp(lanes);
  const WmmaShape& shape = lanes.slot<WmmaSlot>(0).shape;
  if (shape.c == Element::s32)
    multiply<int>(lanes, shape);
  else
    multiply<float>(lanes, shape);
}

}  // namespace

void whole_warp(const Site& site) {
  warp_collective(site, ~0u, nullptr, [](Lanes& lanes) { require_whole_warp(lanes); });
}

void ldmatrix(const Site& site, const void* row, int matrices, bool transposed,
              uint32_t* registers) {
  require(site, 75);
  LoadSlot slot{{}, matrices, transposed, registers};
  if (row) std::memcpy(slot.row, row, sizeof slot.row);
  warp_collective(site, ~0u, &slot, combine_ldmatrix);
}

void mma_f16(const Site& site, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
             const float (&c)[4]) {
  require(site, 80);
  MmaSlot<float> slot{d, a, b, c};
  warp_collective(site, ~0u, &slot, combine_mma<float, 16, 2, half_at>);
}

void mma_s8(const Site& site, int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
            const int (&c)[4]) {
  require(site, 80);
  MmaSlot<int> slot{d, a, b, c};
  warp_collective(site, ~0u, &slot, combine_mma<int, 32, 4, byte_at>);
}

void wmma(const Site& site, const WmmaShape& shape, const void* a, const void* b, const void* c,
          void* d) {
  require(site, shape.c == Element::s32 ? 72 : 70);
  WmmaSlot slot{shape, a, b, c, d};
  warp_collective(site, ~0u, &slot, combine_wmma);
}

}  // namespace emulation
