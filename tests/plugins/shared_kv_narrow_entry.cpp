// SharedKVAttention and SharedKVRead for half activations, INT8 pages and D up to 64 alone: copies
// of the kernels with faults in them are many, and compiled one by one.
#include "shared_kv_attention/kernel.cuh"

namespace attention = edgepool::shared_kv_attention;

extern "C" {
int launch_read(int sm, const attention::ReadParams* p) {
  return gpu::with_arch(sm, [&](auto a) {
    return attention::launch_attention<decltype(a), half, int8_t, 64>(attention::job_of(*p));
  });
}
int launch_attention(int sm, const attention::Params* p) {
  const cudaError_t error = attention::launch_write<half, int8_t>(*p);
  return error == cudaSuccess ? launch_read(sm, &p->attention) : error;
}
size_t workspace_bytes(const attention::ReadParams* p) { return attention::workspace_bytes(*p); }
}
