// SharedKVRead: the attention of SharedKVAttention over pages that a donor layer has written.
// The operator: edgepool/ops/shared_kv_read.py. Cost and launches: those of SharedKVAttention
// (../shared_kv_attention/kernel.cuh) without the write.
#pragma once
#include "../shared_kv_attention/attend.cuh"

namespace edgepool {
namespace shared_kv_read {

using shared_kv_attention::problem;
using shared_kv_attention::workspace_bytes;
using Params = shared_kv_attention::ReadParams;

template <class A>
cudaError_t launch(const Params& p) {
  return shared_kv_attention::attend<A>(p);
}

}  // namespace shared_kv_read
}  // namespace edgepool
