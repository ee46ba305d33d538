// SharedKVAttention: write the new keys and values into their pages, then attend.
// The operator: edgepool/ops/shared_kv_attention.py.
//
// Launches, one after another on the stream:
//   write_new       a warp for each new vector, 8 warps a block      (write.cuh)
//   attend_tile     grid (tiles * splits, Hkv, B), 4 warps a block   (attend.cuh)
//   combine_splits  grid B * S * H, 4 warps a block; if splits > 1
// The write is a launch of its own since blocks of other queries read what it writes.
#pragma once
#include "attend.cuh"
#include "write.cuh"

namespace edgepool {
namespace shared_kv_attention {

inline const char* problem(const Params& p) { return problem(p.attention); }
inline size_t workspace_bytes(const Params& p) { return workspace_bytes(p.attention); }

template <class A>
cudaError_t launch(const Params& p) {
  const cudaError_t error = write(p);
  return error == cudaSuccess ? attend<A>(p.attention) : error;
}

}  // namespace shared_kv_attention
}  // namespace edgepool
