// The TensorRT plugin of SharedKVAttention: edgepool/ops/shared_kv_attention.py.
#include "shared_kv_attention/describe.hpp"
#include "shared_kv_attention/kernel.cuh"

namespace edgepool {
namespace shared_kv_attention {

cudaError_t attend(int sm, const ReadParams& p) {
  return gpu::with_arch(sm, [&](auto arch) { return attend<decltype(arch)>(p); });
}

struct Kernel {
  using Params = shared_kv_attention::Params;
  static constexpr const char* kName = "SharedKVAttention";

  static void describe(plugin::Description& d, const Params& params) {
    using plugin::Kind;
    const ReadParams& p = params.attention;
    const Axes a = describe_sizes(d, p);
    const plugin::Axis select = describe_attributes(d, p);
    d.input("q", Kind::T, {a.B, a.S, a.H, a.D}, p.q);
    d.input("k", Kind::T, {a.B, a.S, a.Hkv, a.D}, params.k);
    d.input("v", Kind::T, {a.B, a.S, a.Hkv, a.D}, params.v);
    d.input("k_pool", Kind::P, {a.NP, a.Hkv, a.T, a.D});
    d.input("v_pool", Kind::P, {a.NP, a.Hkv, a.T, a.D});
    d.input("k_scale", Kind::f32, {a.NP, a.Hkv, a.T}).for_int8();
    d.input("v_scale", Kind::f32, {a.NP, a.Hkv, a.T}).for_int8();
    describe_paging(d, p, a, select);
    d.output("out", Kind::T, {a.B, a.S, a.H, a.D}, p.out);
    d.state("k_pool_out", "k_pool", p.k_pool);
    d.state("v_pool_out", "v_pool", p.v_pool);
    d.state("k_scale_out", "k_scale", p.k_scale);
    d.state("v_scale_out", "v_scale", p.v_scale);
  }

  static void set_device(Params&, const plugin::Device&) {}
  static const char* problem(const Params& p) { return shared_kv_attention::problem(p); }
  static size_t workspace_bytes(const Params& p) { return shared_kv_attention::workspace_bytes(p); }
  static cudaError_t launch(Params& p, const plugin::Launch& l) {
    p.attention.workspace = l.workspace, p.attention.stream = l.stream;
    const cudaError_t error = write(p);
    return error == cudaSuccess ? attend(l.device.sm, p.attention) : error;
  }
};

static const plugin::Registered<Kernel> registered;

}  // namespace shared_kv_attention
}  // namespace edgepool
