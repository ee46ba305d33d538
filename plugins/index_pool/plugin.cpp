// The TensorRT plugin of IndexPool: edgepool/ops/index_pool.py.
#include "common/operator.hpp"
#include "index_pool/kernel.cuh"

namespace edgepool {
namespace index_pool {

struct Kernel {
  using Params = index_pool::Params;
  static constexpr const char* kName = "IndexPool";

  static void describe(plugin::Description& d, const Params& p) {
    using plugin::Kind;
    const auto B = d.size("B", p.B), S = d.size("S", p.S), Hs = d.size("Hs", p.Hs);
    const auto Di = d.size("Di", p.Di), NP = d.size("NP", p.NP), U = d.size("U", p.U);
    const auto MP = d.size("MP", p.MP);
    const auto ratio = d.attribute("ratio", p.ratio, 1);
    const auto weighting = d.attribute("weighting", p.weighting, {"mean", "gate", "query"});
    d.attribute("post_norm", p.post_norm, {"none", "l2"});
    const auto fuse = d.attribute("fuse", p.fuse, 0, 1);
    d.attribute("weight_sparsity", p.weight_sparsity, 0.f, 1.f);
    d.types(p.activation, p.storage);

    const int mean = static_cast<int>(Weighting::mean);
    d.input("keys", Kind::T, {B, S, Hs, Di}, p.keys);
    d.input("gates", Kind::T, {B, S, Hs, Di}, p.gates).unused_if(weighting, mean);
    d.input("ape", Kind::T, {ratio, Hs, Di}, p.ape).unused_if(weighting, mean);
    d.input("fusion", Kind::T, {Hs, Di, Di}, p.fusion).unused_if(fuse, 0);
    d.input("tail", Kind::T, {B, ratio, 2, Hs, Di}, p.tail);
    d.input("index_pool", Kind::P, {Hs, NP, U, Di});
    d.input("index_scale", Kind::f32, {Hs, NP, U}).for_int8();
    d.input("page_table", Kind::i32, {B, MP}, p.page_table);
    d.input("past_len", Kind::i32, {B}, p.past_len);
    d.input("new_len", Kind::i32, {B}, p.new_len);
    d.state("tail_out", "tail", p.tail_out, true);
    d.state("index_pool_out", "index_pool", p.index_pool);
    d.state("index_scale_out", "index_scale", p.index_scale);
  }

  static void set_device(Params&, const plugin::Device&) {}
  static const char* problem(const Params& p) { return index_pool::problem(p); }
  static size_t workspace_bytes(const Params&) { return 0; }
  static cudaError_t launch(Params& p, const plugin::Launch& l) {
    p.stream = l.stream;
    return index_pool::launch(p);
  }
};

static const plugin::Registered<Kernel> registered;

}  // namespace index_pool
}  // namespace edgepool
