// Prints how each kernel is launched in a decode step and in a prefill, for
// scripts/kernel_report.py:
//
//   PHASE <tab> KERNEL (mangled) <tab> THREADS <tab> DYNAMIC_SHARED_BYTES
//
// The kernels' own host code plans the launches; `emulation::launch`, which would execute them, is
// defined here and prints. So nothing of plugins/emulation/runtime is linked.
#include <dlfcn.h>

#include <cstdio>

#include "index_pool/kernel.cuh"
#include "index_pool_select/kernel.cuh"
#include "shared_kv_attention/kernel.cuh"

static const char* phase;

namespace emulation {
cudaError_t launch(const Kernel& kernel, dim3, dim3 block, size_t shared, cudaStream_t) {
  Dl_info symbol;
  if (!dladdr(kernel.function, &symbol) || !symbol.dli_sname) return cudaErrorInvalidDeviceFunction;
  std::printf("%s\t%s\t%u\t%zu\n", phase, symbol.dli_sname, block.x, shared);
  return cudaSuccess;
}
}  // namespace emulation

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

using edgepool::Type;

static bool ok = true;
static void check(cudaError_t error) { ok = ok && error == cudaSuccess; }

constexpr int kContext = 64 << 10, kPage = 64, kRatio = 4;

static void index_pool(int S, Type activation, Type storage) {
  edgepool::index_pool::Params p{};
  p.B = 1, p.S = S, p.Hs = 8, p.Di = 128, p.NP = 2, p.U = kPage / kRatio, p.MP = kContext / kPage;
  p.ratio = kRatio, p.weighting = edgepool::index_pool::Weighting::gate;
  p.activation = activation, p.storage = storage;
  check(edgepool::index_pool::launch(p));
}

static void index_pool_select(int S, int Hq, int Di, int sm, Type activation, Type storage) {
  for (auto scoring :
       {edgepool::index_pool_select::Scoring::relu, edgepool::index_pool_select::Scoring::softmax})
    for (int block : {1, 4}) {
      edgepool::index_pool_select::Params p{};
      p.B = 1, p.S = S, p.Hs = 1, p.Hq = Hq, p.Di = Di, p.NP = 2, p.U = kPage / kRatio;
      p.MP = kContext / kPage, p.scoring = scoring, p.k = 128, p.block = block, p.ratio = kRatio;
      p.activation = activation, p.storage = storage, p.sm = sm, p.multiprocessors = 16;
      p.workspace_size = edgepool::index_pool_select::workspace_bytes(p);
      check(edgepool::index_pool_select::launch(p));
    }
}

template <class A>
static void shared_kv_attention(int S, int D, int select, Type activation, Type storage) {
  edgepool::shared_kv_attention::Params params{};
  auto& p = params.attention;
  p.B = 1, p.S = S, p.H = 32, p.D = D, p.Hkv = 8, p.NP = 2, p.T = kPage, p.MP = kContext / kPage;
  p.Hs = 1, p.K = 32, p.window = 512, p.sinks = 64, p.block_tokens = 32, p.select = select;
  p.activation = activation, p.storage = storage;
  check(edgepool::shared_kv_attention::launch<A>(params));
}

int main() {
  for (int S : {1, 256}) {
    phase = S == 1 ? "decode" : "prefill";
    for (Type activation : {Type::f32, Type::f16})
      for (Type storage : {activation, Type::s8}) {
        index_pool(S, activation, storage);
        for (int sm : {72, 80}) {
          index_pool_select(S, 4, 128, sm, activation, storage);   // `keys`
          index_pool_select(S, 32, 128, sm, activation, storage);  // `learned`
          index_pool_select(S, 8, 16, sm, activation,
                            storage);  // affinities cost more than vectors
        }
        for (int D : {64, 128, 256})
          for (int select : {0, 1}) {
            shared_kv_attention<gpu::Arch<72>>(S, D, select, activation, storage);
            shared_kv_attention<gpu::Arch<80>>(S, D, select, activation, storage);
          }
      }
  }
  return ok ? 0 : 1;
}
