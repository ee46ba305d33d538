// The TensorRT plugin of IndexPoolSelect: edgepool/ops/index_pool_select.py.
#include <algorithm>

#include "common/operator.hpp"
#include "index_pool_select/kernel.cuh"

namespace edgepool {
namespace index_pool_select {

struct Kernel {
  using Params = index_pool_select::Params;
  static constexpr const char* kName = "IndexPoolSelect";

  static void describe(plugin::Description& d, const Params& p) {
    using plugin::Kind;
    const auto B = d.size("B", p.B), S = d.size("S", p.S), Hs = d.size("Hs", p.Hs);
    const auto Hq = d.size("Hq", p.Hq), Di = d.size("Di", p.Di), NP = d.size("NP", p.NP);
    const auto U = d.size("U", p.U), MP = d.size("MP", p.MP);
    const auto scoring = d.attribute("scoring", p.scoring, {"relu", "softmax"});
    const auto k = d.attribute("k", p.k, 0);
    d.attribute("block", p.block, 1);
    d.attribute("ratio", p.ratio, 1);
    d.attribute("window", p.window, 0);
    d.attribute("sinks", p.sinks, 0);
    d.types(p.activation, p.storage);

    const int softmax = static_cast<int>(Scoring::softmax);
    d.input("q", Kind::T, {B, S, Hs, Hq, Di}, p.q);
    d.input("w", Kind::T, {B, S, Hs, Hq}, p.w).unused_if(scoring, softmax);
    d.input("index_pool", Kind::P, {Hs, NP, U, Di}, p.index_pool);
    d.input("index_scale", Kind::f32, {Hs, NP, U}, p.index_scale).for_int8();
    d.input("page_table", Kind::i32, {B, MP}, p.page_table);
    d.input("past_len", Kind::i32, {B}, p.past_len);
    d.input("new_len", Kind::i32, {B}, p.new_len);
    d.output("selected", Kind::i32, {B, S, Hs, k}, p.selected);
  }

  static void set_device(Params& p, const plugin::Device& device) {
    p.sm = device.sm, p.multiprocessors = device.multiprocessors;
  }
  static const char* problem(const Params& p) { return index_pool_select::problem(p); }
  // Few queries store their affinities, and may take more than many, which do not. TensorRT asks
  // for the most of a profile only.
  static size_t workspace_bytes(const Params& p) {
    size_t most = index_pool_select::workspace_bytes(p);
    if (p.scoring == Scoring::softmax && !detail::basic_plan(p).stored) {
      Params few = p;
      for (few.S = 1; few.S < p.S && detail::basic_plan(few).stored; ++few.S)
        most = std::max(most, index_pool_select::workspace_bytes(few));
    }
    return most;
  }
  static cudaError_t launch(Params& p, const plugin::Launch& l) {
    p.workspace = l.workspace, p.workspace_size = l.workspace_bytes;
    p.stream = l.stream;
    return index_pool_select::launch(p);
  }
};

static const plugin::Registered<Kernel> registered;

}  // namespace index_pool_select
}  // namespace edgepool
