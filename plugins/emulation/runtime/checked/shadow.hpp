// A shadow of the memory that kernels share: for each byte, whether it may be read, and who
// touched it last.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulation {

// One access, in 64 bits; 0 is none.
struct Stamp {
  uint64_t epoch : 26;   // block barriers and block starts so far
  uint64_t clock : 14;   // of its thread, within the epoch
  uint64_t thread : 10;  // of its block
  uint64_t site : 13;    // index into the table of places, 0 if it is full
  uint64_t is_atomic : 1;
};
static_assert(sizeof(Stamp) == 8, "");

struct Cell {
  Stamp write;
  // The last reader, and another since the last write, of another warp or block if there was one:
  // whoever writes next is a different thread than at least one of them.
  Stamp read, other_read;
};

enum ByteState : uint8_t { kOutside, kUnwritten, kWritten, kInFlight };

struct Region {
  const char* name = nullptr;
  bool is_shared = false;
  uintptr_t begin = 0, end = 0;
  Cell* cells = nullptr;
  uint8_t* states = nullptr;

  bool contains(uintptr_t address) const { return address - begin < end - begin; }
  Cell& cell(uintptr_t address) const { return cells[address - begin]; }
  uint8_t& state(uintptr_t address) const { return states[address - begin]; }
};

// Address space for `bytes` bytes, zero until touched.
void* reserve(size_t bytes);
void release_reserved(void*, size_t bytes);
// Zeros them again.
void clear_reserved(void*, size_t bytes);

Region make_region(const char* name, bool is_shared, uintptr_t begin, size_t bytes);

// A table that gives each code address a small number.
class Places {
 public:
  uint64_t number(const void* code);  // 0 if the table is full
  const void* code(uint64_t number) const { return codes_[number]; }

 private:
  static constexpr unsigned kPlaces = 1 << 13;
  const void* codes_[kPlaces] = {};
  uint16_t slots_[2 * kPlaces] = {};  // open addressing, by a hash of the code address
  unsigned used_ = 0;
};

}  // namespace emulation
