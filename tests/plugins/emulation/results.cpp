// What kernels compute under the emulation, compared with plain C++.
#include "check.hpp"
#include "kernels.cuh"

namespace {

using Ints = std::vector<int>;
using Floats = std::vector<float>;
using A80 = gpu::Arch<80>;

template <class T, class Make>
std::vector<T> make(int n, Make value) {
  std::vector<T> v(n);
  for (T& x : v) x = value();
  return v;
}
Ints random_ints(int n, int low, int high) {
  return make<int>(n, [=] { return integer(low, high); });
}
Floats random_floats(int n) { return make<float>(n, uniform); }
std::vector<half> random_halves(int n) {
  return make<half>(n, [] { return __float2half(uniform()); });
}

template <class... P>
void run(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
         std::common_type_t<P>... arguments) {
  CHECK(gpu::launch(kernel, grid, block, shared, nullptr, arguments...) == cudaSuccess);
}

void test_places() {
  DeviceArray<int> out(2 * 3 * 4 * 5 * 3 * 2);
  run(places, dim3(2, 3, 4), dim3(5, 3, 2), 0, out);
  const Ints got = out.host();
  for (size_t i = 0; i < got.size(); ++i) CHECK(got[i] == static_cast<int>(i / 30 * 1000 + i % 30));
}

void test_shuffles() {
  const Ints v = random_ints(32, -9, 9);
  DeviceArray<int> in(v), out(kShuffles * 32);
  run(shuffles, 1, 32, 0, in, out);
  const Ints got = out.host();
  unsigned positive = 0;
  for (int l = 0; l < 32; ++l) positive |= static_cast<unsigned>(v[l] > 0) << l;
  for (int l = 0; l < 32; ++l) {
    unsigned same = 0;
    for (int o = 0; o < 32; ++o) same |= static_cast<unsigned>((v[o] & 3) == (v[l] & 3)) << o;
    const int want[kShuffles] = {
        v[5],
        v[(l + 3) % 32],
        v[l / 8 * 8 + 1],
        l < 2 ? v[l] : v[l - 2],
        l % 8 < 3 ? v[l] : v[l - 3],
        l + 4 > 31 ? v[l] : v[l + 4],
        l % 16 == 15 ? v[l] : v[l + 1],
        v[l ^ 17],
        v[l ^ 5],
        static_cast<int>(positive),
        1,
        static_cast<int>(same),
    };
    for (int i = 0; i < kShuffles; ++i) CHECK(got[i * 32 + l] == want[i]);
  }
}

void test_masks() {
  DeviceArray<int> out(32);
  run(half_masks, 1, 32, 0, out);
  const Ints got = out.host();
  for (int l = 0; l < 32; ++l)
    CHECK(got[l] == (l % 2 ? (l ^ 2) + static_cast<int>(0xaaaa0000u) : (l ^ 4)));

  DeviceArray<int> left(32, -5);
  run(early_exit, 1, 32, 0, left);
  for (int l = 0; l < 32; ++l) CHECK(left.host()[l] == (l < 20 ? 0xfffff + 1 : -5));
}

void test_warp_reduce() {
  const Ints v = random_ints(32, -1000, 1000);
  DeviceArray<int> in(v), out(9);
  run(warp_reduce<int>, 1, 32, 0, in, out);
  int sum = 0, low = v[0], high = v[0], both = -1, either = 0, odd = 0;
  unsigned ulow = ~0u, uhigh = 0;
  for (int x : v) {
    const auto u = static_cast<unsigned>(x);
    sum += x, low = std::min(low, x), high = std::max(high, x);
    ulow = std::min(ulow, u), uhigh = std::max(uhigh, u);
    both &= x | 3, either |= x & 0xff, odd ^= x;
  }
  CHECK(out.host() == Ints({sum, low, static_cast<int>(ulow), high, static_cast<int>(uhigh), both,
                            either, odd, 0}));
}

void test_block() {
  const Ints x = random_ints(64, 0, 999);
  DeviceArray<int> in(x), out(64);
  run(warp_exchange, 1, 64, 0, in, out);
  for (int i = 0; i < 64; ++i) CHECK(out.host()[i] == x[i ^ 1]);

  Ints v = random_ints(96, -9, 9);
  v[7] = 1000;
  int positive = 0;
  for (int e : v) positive += e > 0;
  DeviceArray<int> votes(v), result(1);
  run(block_votes, 1, 96, 0, votes, result);
  CHECK(result.host()[0] == positive * 4 + 3);

  const int rounds = 7;
  const Ints data = random_ints(64 * rounds, 0, 999);
  DeviceArray<int> from(data), to(64 * rounds);
  run(producer_consumer, 1, 128, 0, from, to, rounds);
  for (int i = 0; i < 64 * rounds; ++i) CHECK(to.host()[i] == data[i / 64 * 64 + 63 - i % 64]);
}

void test_sums() {
  const int rows = 24, n = 1000;
  const Floats x = random_floats(rows * n);
  DeviceArray<float> in(x), out(rows);
  run(row_sum, rows, 256, 0, in, out, n);
  Floats want(rows);
  for (int r = 0; r < rows; ++r) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += x[r * n + i];
    want[r] = static_cast<float>(sum);
  }
  CHECK(difference(out.host(), want) < 1e-4);

  DeviceArray<float> part(31), total(1);
  DeviceArray<unsigned> done(1, 0u);
  run(last_block_sum, 31, 32, 0, in, part, done, total, 990);
  double sum = 0;
  for (int i = 0; i < 990; ++i) sum += x[i];
  CHECK(std::fabs(total.host()[0] - sum) < 1e-4);
}

void test_tiled_product() {
  const int M = 50, N = 70, K = 45;
  const Floats a = random_floats(M * K), b = random_floats(K * N);
  DeviceArray<float> da(a), db(b), dc(M * N);
  run(tiled_product<16>, dim3(5, 4), dim3(16, 16), 0, da, db, dc, M, N, K);
  Floats want(M * N);
  for (int r = 0; r < M; ++r)
    for (int c = 0; c < N; ++c)
      for (int k = 0; k < K; ++k) want[r * N + c] += a[r * K + k] * b[k * N + c];
  CHECK(difference(dc.host(), want) < 1e-4);
}

void test_histogram() {
  const int n = 5000, bins = 37;
  const Ints x = random_ints(n, 0, bins - 1);
  DeviceArray<int> in(x), out(bins, 0), positive(1, 0);
  run(histogram, (n + 255) / 256, 256, bins * sizeof(int), in, out, positive, n, bins);
  Ints want(bins);
  int above = 0;
  for (int v : x) ++want[v], above += v > 0;
  CHECK(out.host() == want);
  CHECK(positive.host()[0] == above);
}

// Bit-equal to one rounding of the exact product and sum.
void test_half() {
  const int pairs = 300;
  const auto x = random_halves(2 * pairs), a = random_halves(2 * pairs);
  DeviceArray<half> dx(x), da(a), dy(2 * pairs);
  run(fused_multiply<half2, half>, 3, 128, 0, dx, da, dy, pairs, __float2half(0.25f));
  std::vector<float> want, got;
  for (int i = 0; i < 2 * pairs; ++i) {
    const double exact = static_cast<double>(__half2float(x[i])) * __half2float(a[i]) + 0.25;
    want.push_back(__half2float(__double2half(exact)));
    got.push_back(__half2float(dy.host()[i]));
  }
  CHECK(difference(got, want) == 0);
}

void test_bfloat16() {
  using T = __nv_bfloat16;
  const int pairs = 300;
  const auto draw = [] { return __float2bfloat16(uniform()); };
  const auto x = make<T>(2 * pairs, draw), a = make<T>(2 * pairs, draw);
  DeviceArray<T> dx(x), da(a), dy(2 * pairs);
  run(fused_multiply<__nv_bfloat162, T>, 3, 128, 0, dx, da, dy, pairs, __float2bfloat16(0.25f));
  std::vector<float> want, got;
  for (int i = 0; i < 2 * pairs; ++i) {
    const double exact =
        static_cast<double>(__bfloat162float(x[i])) * __bfloat162float(a[i]) + 0.25;
    want.push_back(__bfloat162float(__double2bfloat16(exact)));
    got.push_back(__bfloat162float(dy.host()[i]));
  }
  CHECK(difference(got, want) == 0);
}

void test_dot_int8() {
  std::vector<signed char> a(128), b(128);
  for (signed char& v : a) v = static_cast<signed char>(integer(-128, 127));
  for (signed char& v : b) v = static_cast<signed char>(integer(-128, 127));
  Ints wa(32), wb(32), want(32, 1);
  std::memcpy(wa.data(), a.data(), 128);
  std::memcpy(wb.data(), b.data(), 128);
  for (int i = 0; i < 128; ++i) want[i / 4] += a[i] * b[i];
  DeviceArray<int> da(wa), db(wb), out(32);
  run(dot_int8, 1, 32, 0, da, db, out);
  CHECK(out.host() == want);
}

float value(half h) { return __half2float(h); }
int value(signed char c) { return c; }

// A[M, K] B[N, K]^T in double.
template <class T>
std::vector<double> product(const std::vector<T>& a, const std::vector<T>& b, int M, int N, int K) {
  std::vector<double> c(M * N);
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n)
      for (int k = 0; k < K; ++k)
        c[m * N + n] += static_cast<double>(value(a[m * K + k])) * value(b[n * K + k]);
  return c;
}

void test_tensor_cores() {
  const int M = 64, N = 96, K = 96;
  const auto a = random_halves(M * K), b = random_halves(N * K);
  const auto want = product(a, b, M, N, K);
  DeviceArray<half> da(a), db(b);
  DeviceArray<float> c(M * N);
  run(wmma_product<16, 16, half, float>, dim3(N / 16, M / 16), 32, 0, da, db, c, N, K);
  CHECK(difference(c.host(), want) < 1e-4);
  run(wmma_product<32, 8, half, float>, dim3(N / 8, M / 32), 32, 0, da, db, c, N, K);
  CHECK(difference(c.host(), want) < 1e-4);
  run(wmma_product<8, 32, half, float>, dim3(N / 32, M / 8), 32, 0, da, db, c, N, K);
  CHECK(difference(c.host(), want) < 1e-4);
  cudaMemset(c, 0, M * N * sizeof(float));
  run(mma_product<A80>, dim3(N / 8, M / 16), 32, 0, da, db, c, N, K);
  CHECK(difference(c.host(), want) < 1e-4);

  DeviceArray<half> ch(M * N);
  run(wmma_product<16, 16, half, half>, dim3(N / 16, M / 16), 32, 0, da, db, ch, N, K);
  Floats rounded;
  for (half h : ch.host()) rounded.push_back(__half2float(h));
  CHECK(difference(rounded, want) < 0.05);
}

void test_tensor_cores_int8() {
  const int M = 64, N = 96, K = 96;
  const auto draw = [] { return static_cast<signed char>(integer(-128, 127)); };
  const auto a = make<signed char>(M * K, draw), b = make<signed char>(N * K, draw);
  const auto want = product(a, b, M, N, K);
  DeviceArray<signed char> da(a), db(b);
  DeviceArray<int> c(M * N);
  run(wmma_product<16, 16, signed char, int>, dim3(N / 16, M / 16), 32, 0, da, db, c, N, K);
  CHECK(difference(c.host(), want) == 0);
  cudaMemset(c, 0, M * N * sizeof(int));
  run(mma_product_int8<A80>, dim3(N / 8, M / 16), 32, 0, da, db, c, N, K);
  CHECK(difference(c.host(), want) == 0);
}

void test_async_copies() {
  std::vector<char> x(32 * 16);
  for (char& v : x) v = static_cast<char>(integer(1, 70));
  DeviceArray<char> in(x), out(3 * 32 * 16);
  for (int filled : {16, 5, 0}) {
    run(async_copies<A80>, 1, 32, 0, in, out, filled);
    const auto got = out.host();
    const int bytes[3] = {16, 8, 4};
    for (int c = 0; c < 3; ++c)
      for (int t = 0; t < 32; ++t)
        for (int i = 0; i < 16; ++i) {
          const char want = i >= bytes[c] ? 77 : i < filled ? x[(t ^ 1) * 16 + i] : 0;
          CHECK(got[(c * 32 + t) * 16 + i] == want);
        }
  }
}

}  // namespace

int main() {
  test_places();
  test_shuffles();
  test_masks();
  test_warp_reduce();
  test_block();
  test_sums();
  test_tiled_product();
  test_histogram();
  test_half();
  test_bfloat16();
  test_dot_int8();
  test_tensor_cores();
  test_tensor_cores_int8();
  test_async_copies();
  CHECK(emulation_fault_count() == 0);
  return finish();
}
