// The tokens that a tile of queries attends, as steps of up to 32 tokens, one for each lane of a warp.
//
// A token comes with the set of the tile's queries that see it (one bit each), so a step may hold
// tokens of several blocks and pages, and every token of the attended set comes exactly once:
//   sinks     [0, sinks), seen by every query at or after the token
//   selected  a query's blocks, in [sinks, local_start(t))
//   local     [local_start(t), t]
// Nothing is visited that no query of the tile attends, but for a step's last lanes.
#pragma once
#include <climits>

#include "plan.cuh"

namespace edgepool {
namespace shared_kv_attention {

struct Job {
  ReadParams in;
  Plan plan;
};

// What a lane knows of its token; nobody sees it if `queries` is 0.
struct alignas(16) Token {
  int row;  // in a pool of rows [NP * Hkv * T, D]
  unsigned queries;
  float k_scale, v_scale;  // of int8 pages
};

// The queries of a block, at positions first .. first + count - 1.
struct Tile {
  int b, kv_head, query;  // of S
  int first, count;
  int selected_row;  // of `selected` [B, S, Hs, K], for query 0
};

// The tile of sequence b from row `query` on; count is 0 if all its queries are padding.
GPU_DEVICE Tile tile_at(const Job& job, int b, int kv_head, int query) {
  const ReadParams& in = job.in;
  Tile tile;
  tile.b = b;
  tile.kv_head = kv_head;
  tile.query = query;
  const int past = clamp(load_uniform(in.past_len + b), 0, in.MP * in.T);
  const int fresh = clamp(load_uniform(in.new_len + b), 0, min(in.S, in.MP * in.T - past));
  tile.first = past + tile.query;
  tile.count = clamp(fresh - tile.query, 0, job.plan.queries);
  tile.selected_row = (tile.b * in.S + tile.query) * in.Hs + (in.Hs > 1 ? tile.kv_head : 0);
  return tile;
}

// Where a row of the tile is in q and out, [B * S * H] rows.
GPU_DEVICE int64_t place_of_row(const Job& job, const Tile& tile, int row) {
  const int group = job.plan.group;
  const int64_t query = int64_t{tile.b} * job.in.S + tile.query + row / group;
  return query * job.in.H + tile.kv_head * group + row % group;
}

// Where column `column` of the token's vector is. 32 bits hold the offset of every element.
template <class P>
GPU_DEVICE const P* part_of(const void* pool, const Token& token, int D, int column) {
  return static_cast<const P*>(pool) + static_cast<unsigned>(token.row * D + column);
}

// Bits 0 .. n - 1.
GPU_DEVICE unsigned below(int n) { return n <= 0 ? 0u : n >= 32 ? kAll : (1u << n) - 1; }

// The tile's three parts and who sees a token of them.
class Visibility {
 public:
  GPU_DEVICE Visibility(const Job& job, const Tile& tile)
      : block_(job.in.block_tokens),
        window_(job.in.window),
        select_(job.in.select),
        first_(tile.first),
        count_(tile.count) {
    const int end = first_ + count_;
    const bool everything = !select_ && !window_;
    sinks_ = everything ? 0 : min(job.in.sinks, end);
    const int start = everything ? 0 : max(0, first_ + 1 - window_);
    local_ = max(sinks_, select_ ? start / block_ * block_ : start);
    local_count_ = max(0, end - local_);
  }

  GPU_DEVICE int sink_count() const { return sinks_; }
  GPU_DEVICE int local_begin() const { return local_; }
  GPU_DEVICE int local_count() const { return local_count_; }

  // Who sees a token that is in a sink or in somebody's local span.
  GPU_DEVICE unsigned always(int token) const {
    return token < sinks_ ? causal(token) : causal(token) & below(local_end(token) - first_);
  }
  // Who of those that selected the token's block sees it for that reason alone.
  GPU_DEVICE unsigned chosen(int token, unsigned by) const {
    return token < sinks_ ? 0 : by & causal(token) & ~below(local_end(token) - first_);
  }

 private:
  GPU_DEVICE unsigned causal(int token) const { return below(count_) & ~below(token - first_); }
  // The first position whose local span begins after the token: local_start(t) <= token iff
  // floor((t + 1 - window) / block) <= floor(token / block).
  GPU_DEVICE int local_end(int token) const {
    if (select_) return (token / block_ + 1) * block_ + window_ - 1;
    return window_ ? token + window_ : INT_MAX;
  }

  int block_, window_, select_, first_, count_, sinks_, local_, local_count_;
};

// Finds a token in the pools.
template <class P>
GPU_DEVICE Token locate(const Job& job, const Tile& tile, int token, unsigned queries) {
  const float scale = sizeof(P) == 1 ? 0.f : 1.f;
  Token found{0, 0, scale, scale};
  if (!queries) return found;
  const ReadParams& in = job.in;
  const int page =
      physical_page(in.page_table + int64_t{tile.b} * in.MP, token / in.T, in.MP, in.NP);
  if (!page) return found;
  found.row = (page * in.Hkv + tile.kv_head) * in.T + token % in.T;
  found.queries = queries;
  if (sizeof(P) == 1) {
    found.k_scale = gpu::load_readonly(in.k_scale + found.row);
    found.v_scale = gpu::load_readonly(in.v_scale + found.row);
  }
  return found;
}

GPU_DEVICE int selected_block(const Job& job, const Tile& tile, int query, int i) {
  const ReadParams& in = job.in;
  const int64_t row = tile.selected_row + int64_t{query} * in.Hs;
  const int block = gpu::load_readonly(in.selected + row * in.K + i);
  const int blocks = in.MP * (in.T / in.block_tokens);
  return block >= 0 && block < blocks ? block : -1;
}

// The attended set of one query, or of several without selected blocks. Its steps can be counted, so
// they are shared out between the splits, and between the `ways` warps that work on the same rows.
template <class P>
class Counted {
 public:
  GPU_DEVICE Counted(const Job& job, const Tile& tile, int way, int ways)
      : visible_(job, tile), ways_(ways) {
    const ReadParams& in = job.in;
    selected_count_ = in.select ? in.K * in.block_tokens : 0;
    count_ = visible_.sink_count() + selected_count_ + visible_.local_count();
    const int steps = (count_ + kStep - 1) / kStep;
    const int each = (steps + job.plan.splits - 1) / job.plan.splits;
    const int split = static_cast<int>(blockIdx.x) % job.plan.splits;
    step_ = split * each + way;
    end_ = min(steps, (split + 1) * each);
  }

  // This lane's token of the warp's next step; false if there is no step left.
  GPU_DEVICE bool next(const Job& job, const Tile& tile, Token& found) {
    if (step_ >= end_) return false;
    int i = step_ * kStep + static_cast<int>(threadIdx.x) % kLanes;
    step_ += ways_;
    int token = 0;
    unsigned queries = 0;
    if (i < visible_.sink_count()) {
      token = i;
      queries = visible_.always(token);
    } else if ((i -= visible_.sink_count()) < selected_count_) {
      const int size = job.in.block_tokens;
      const int block = selected_block(job, tile, 0, i / size);
      token = block * size + i % size;
      if (block >= 0) queries = visible_.chosen(token, 1);
    } else if ((i -= selected_count_) < visible_.local_count()) {
      token = visible_.local_begin() + i;
      queries = visible_.always(token);
    }
    found = locate<P>(job, tile, token, queries);
    return true;
  }

 private:
  Visibility visible_;
  int ways_, selected_count_, count_, step_, end_;
};

// The attended set of several queries with selected blocks of their own. Lane l walks through the
// list of query l; the lowest block that any of them has reached comes next, for all that have it.
template <class P>
class Streamed {
 public:
  GPU_DEVICE Streamed(const Job& job, const Tile& tile, int way, int ways)
      : visible_(job, tile), way_(way), ways_(ways), lane_(static_cast<int>(threadIdx.x) % kLanes) {
    part_ = kSinks;
    start_ = 0;
    left_ = visible_.sink_count();
    reached_ = next_ = kNone;
    if (lane_ < tile.count) {
      reached_ = advance(job, tile);
      next_ = advance(job, tile);
    }
  }

  GPU_DEVICE bool next(const Job& job, const Tile& tile, Token& found) {
    int token = 0;
    unsigned queries = 0;
    // The warps of the same rows take turns; each goes through the steps of all.
    for (int turn = 0; turn < ways_; ++turn) {
      const bool mine = turn == way_;
      int filled = 0;
      while (filled < kStep && (left_ > 0 || begin_part(job, tile))) {
        const int n = min(left_, kStep - filled);
        if (mine && lane_ >= filled && lane_ < filled + n) {
          token = start_ + lane_ - filled;
          queries = part_ == kSelected ? visible_.chosen(token, by_) : visible_.always(token);
        }
        start_ += n;
        left_ -= n;
        filled += n;
      }
      if (!filled) {
        if (turn <= way_) return false;
        break;
      }
    }
    found = locate<P>(job, tile, token, queries);
    return true;
  }

 private:
  enum Part { kSinks, kSelected, kLocal };
  static constexpr int kNone = INT_MAX;

  // The next valid block of this lane's list.
  GPU_DEVICE int advance(const Job& job, const Tile& tile) {
    while (index_ < job.in.K) {
      const int block = selected_block(job, tile, lane_, index_++);
      if (block >= 0) return block;
    }
    return kNone;
  }

  // Sets start_, left_ and by_ for what comes next; false if that is nothing.
  GPU_DEVICE bool begin_part(const Job& job, const Tile& tile) {
    if (part_ == kLocal) return false;
    part_ = kSelected;
    int lowest = reached_;
    GPU_UNROLL
    for (int other = kLanes / 2; other; other /= 2)
      lowest = min(lowest, __shfl_xor_sync(kAll, lowest, other));
    if (lowest == kNone) {
      part_ = kLocal;
      start_ = visible_.local_begin();
      left_ = visible_.local_count();
      return left_ > 0;
    }
    by_ = __ballot_sync(kAll, reached_ == lowest);
    start_ = lowest * job.in.block_tokens;
    left_ = job.in.block_tokens;
    if (reached_ == lowest) {
      reached_ = next_;
      next_ = advance(job, tile);
    }
    return true;
  }

  Visibility visible_;
  int way_, ways_, lane_, index_ = 0;
  Part part_;
  int start_, left_;
  unsigned by_ = 0;
  int reached_, next_;
};

}  // namespace shared_kv_attention
}  // namespace edgepool
