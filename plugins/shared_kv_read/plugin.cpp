// The TensorRT plugin of SharedKVRead: edgepool/ops/shared_kv_read.py.
#include "shared_kv_attention/describe.hpp"

namespace edgepool {
namespace shared_kv_read {

struct Kernel {
  using Params = shared_kv_attention::ReadParams;
  static constexpr const char* kName = "SharedKVRead";

  static void describe(plugin::Description& d, const Params& p) {
    using plugin::Kind;
    const shared_kv_attention::Axes a = shared_kv_attention::describe_sizes(d, p);
    const plugin::Axis select = shared_kv_attention::describe_attributes(d, p);
    d.input("q", Kind::T, {a.B, a.S, a.H, a.D}, p.q);
    d.input("k_pool", Kind::P, {a.NP, a.Hkv, a.T, a.D}, p.k_pool);
    d.input("v_pool", Kind::P, {a.NP, a.Hkv, a.T, a.D}, p.v_pool);
    d.input("k_scale", Kind::f32, {a.NP, a.Hkv, a.T}, p.k_scale).for_int8();
    d.input("v_scale", Kind::f32, {a.NP, a.Hkv, a.T}, p.v_scale).for_int8();
    shared_kv_attention::describe_paging(d, p, a, select);
    d.output("out", Kind::T, {a.B, a.S, a.H, a.D}, p.out);
  }

  static void set_device(Params&, const plugin::Device&) {}
  static const char* problem(const Params& p) { return shared_kv_attention::problem(p); }
  static size_t workspace_bytes(const Params& p) { return shared_kv_attention::workspace_bytes(p); }
  static cudaError_t launch(Params& p, const plugin::Launch& l) {
    p.workspace = l.workspace, p.stream = l.stream;
    return shared_kv_attention::attend(l.device.sm, p);
  }
};

static const plugin::Registered<Kernel> registered;

}  // namespace shared_kv_read
}  // namespace edgepool
