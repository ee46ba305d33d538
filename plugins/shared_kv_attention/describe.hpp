// What the plugins of SharedKVAttention and SharedKVRead have in common.
#pragma once
#include "common/operator.hpp"
#include "shared_kv_attention/plan.cuh"

namespace edgepool {
namespace shared_kv_attention {

struct Axes {
  plugin::Axis B, S, H, D, Hkv, NP, T, MP, Hs, K;
};

inline Axes describe_sizes(plugin::Description& d, const ReadParams& p) {
  return {d.size("B", p.B),     d.size("S", p.S),   d.size("H", p.H), d.size("D", p.D),
          d.size("Hkv", p.Hkv), d.size("NP", p.NP), d.size("T", p.T), d.size("MP", p.MP),
          d.size("Hs", p.Hs),   d.size("K", p.K)};
}

// Returns `select`, without which `selected` is not used.
inline plugin::Axis describe_attributes(plugin::Description& d, const ReadParams& p) {
  d.attribute("window", p.window, 0);
  d.attribute("sinks", p.sinks, 0);
  d.attribute("block_tokens", p.block_tokens, 1);
  d.attribute("scale", p.scale, -3e38f, 3e38f);
  const plugin::Axis select = d.attribute("select", p.select, 0, 1);
  d.types(p.activation, p.storage);
  return select;
}

// The inputs after the pools and their scales.
inline void describe_paging(plugin::Description& d, const ReadParams& p, const Axes& a,
                            plugin::Axis select) {
  using plugin::Kind;
  d.input("page_table", Kind::i32, {a.B, a.MP}, p.page_table);
  d.input("past_len", Kind::i32, {a.B}, p.past_len);
  d.input("new_len", Kind::i32, {a.B}, p.new_len);
  d.input("selected", Kind::i32, {a.B, a.S, a.Hs, a.K}, p.selected).unused_if(select, 0);
}

// The attention of both, compiled once: plugin.cpp.
cudaError_t attend(int sm, const ReadParams& p);

}  // namespace shared_kv_attention
}  // namespace edgepool
