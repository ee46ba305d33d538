// The kernels of SharedKVAttention and SharedKVRead for tests/plugins/test_shared_kv_*_kernel.py.
#include "shared_kv_attention/kernel.cuh"
#include "shared_kv_read/kernel.cuh"

namespace attention = edgepool::shared_kv_attention;
namespace read = edgepool::shared_kv_read;

extern "C" {
#ifdef MUTANT
// Half activations, INT8 pages and D up to 64 only: mutants are many, and compiled one by one.
int launch_attention(int sm, const attention::Params* p) {
  const cudaError_t error = attention::launch_write<half, int8_t>(*p);
  if (error != cudaSuccess) return error;
  return gpu::with_arch(sm, [&](auto a) {
    return attention::launch_attention<decltype(a), half, int8_t, 64>(
        attention::job_of(p->attention));
  });
}
#else
int launch_attention(int sm, const attention::Params* p) {
  return gpu::with_arch(sm, [&](auto a) { return attention::launch<decltype(a)>(*p); });
}
int launch_read(int sm, const read::Params* p) {
  return gpu::with_arch(sm, [&](auto a) { return read::launch<decltype(a)>(*p); });
}
#endif
const char* problem(const read::Params* p) { return read::problem(*p); }
size_t workspace_bytes(const read::Params* p) { return read::workspace_bytes(*p); }
int splits(const read::Params* p) { return attention::plan(*p).splits; }
}
