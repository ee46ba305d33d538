// SharedKVAttention: write the new keys and values into their pages, then attend. The definition is
// edgepool/ops/shared_kv_attention.py.
//
// Launches, one after another on the stream:
//   write_new       a warp for each new vector, 8 warps a block             write.cuh
//   attend_tile     grid (tiles * splits, Hkv, B), 4 warps a block          attend.cuh
//   combine_splits  grid B * S * H, 4 warps a block; if splits > 1          attend.cuh
// The write is a launch of its own since blocks of other queries read what it writes. plan.cuh says
// how work is cut into tiles and splits, from shapes alone; attended_set.cuh which tokens a tile
// visits.
//   decode    (select = 1 with S up to 8) a tile is one query's G heads; its tokens are shared out
//             between splits and the 4 warps of a block
//   tiled     (select = 0, or larger S) a tile is up to 32 queries and 64 rows (32 if D > 128);
//             select = 0 is split while there are few tiles
// The shapes are the same on every architecture; what a warp does is not:
//   sm_80 and later, half activations   16 rows, mma.m16n8k16 from registers           tensor.cuh
//   sm_72, or float activations         16 rows (8 if D > 128), FP32 through shared memory  simt.cuh
// Registers are for 2 blocks on a multiprocessor (3: tensor with D up to 64), and none spill. Shared
// memory: 2.8 KiB, and rows * (D + 4) * 4 bytes (tensor) or rows * D * 4 bytes and 28 KiB (SIMT).
//
// Bytes. s, p: of an element of T and P; e = 8 for the scales of s8; A: tokens that a query attends.
//   read     B Hkv A (2 D p + e) of pages in decode, once for all of a group's heads; 2 B S Hkv D s
//            of new keys and values, B S H D s of queries, for each split again
//   written  2 B S Hkv (D p + e / 2) of pages, B S H D s of output
//   splits   8 B S H (D + 2), half of it read, for each; their number keeps this below 5 %
//   tables   4 A of page_table and, for selected tokens, 4 of `selected`: neighbouring lanes read
//            the same word, so it is one transaction a page or block
// A does not depend on the context at select = 1: sinks + K * block_tokens + window + block_tokens
// at most. A tile of several queries reads the union of what they attend, its warps through one L1.
// Operations: 4 A D for each of the B S H rows; the tensor path rounds a warp's rows up to 16.
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
