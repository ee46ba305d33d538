// The kernels of SharedKVAttention and SharedKVRead for tests/plugins/test_shared_kv_*_kernel.py.
#include "shared_kv_attention/kernel.cuh"
#include "shared_kv_read/kernel.cuh"

namespace attention = edgepool::shared_kv_attention;
namespace read = edgepool::shared_kv_read;

extern "C" {
int launch_attention(int sm, const attention::Params* p) {
  return gpu::with_arch(sm, [&](auto a) { return attention::launch<decltype(a)>(*p); });
}
int launch_read(int sm, const read::Params* p) {
  return gpu::with_arch(sm, [&](auto a) { return read::launch<decltype(a)>(*p); });
}
const char* problem(const read::Params* p) { return read::problem(*p); }
size_t workspace_bytes(const read::Params* p) { return read::workspace_bytes(*p); }
int splits(const read::Params* p) { return attention::plan(*p).splits; }
}
