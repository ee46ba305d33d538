// Plays TensorRT for a plugin library, with its public headers alone: finds the creators, keeps the
// log, and calls plugins of either interface as a builder and an execution context do. A C
// interface for ctypes; host.py says what each function is for.
#include <dlfcn.h>

#include <string>
#include <utility>
#include <vector>

#include "guard.hpp"
#include "plugin.hpp"

using namespace conformance;
using nvinfer1::PluginFieldCollection;

namespace {

struct Log final : nvinfer1::ILogger {
  std::vector<std::pair<int, std::string>> lines;
  void log(Severity severity, const char* text) noexcept override {
    lines.emplace_back(static_cast<int>(severity), text ? text : "(null)");
  }
} messages;

struct Finder final : nvinfer1::ILoggerFinder {
  nvinfer1::ILogger* findLogger() override { return &messages; }
} finder;

// A creator of either interface.
struct Creator {
  nvinfer1::IPluginCreatorV3One* v3;
  nvinfer1::IPluginCreator* v2;

  explicit Creator(nvinfer1::IPluginCreatorInterface* creator) : v3(nullptr), v2(nullptr) {
    const std::string kind = creator->getInterfaceInfo().kind;
    if (kind == "PLUGIN CREATOR_V3ONE") v3 = static_cast<nvinfer1::IPluginCreatorV3One*>(creator);
    if (kind == "PLUGIN CREATOR_V1") v2 = static_cast<nvinfer1::IPluginCreator*>(creator);
  }
  template <class F>
  auto either(F&& f) const {
    return v3 ? f(*v3) : f(*v2);
  }
};

struct Host {
  std::vector<Creator> creators;
};

template <class T>
T* symbol(void* library, const char* name) {
  return reinterpret_cast<T*>(dlsym(library, name));
}

std::unique_ptr<Plugin> wrap(const Creator& creator, nvinfer1::IPluginV3* made) {
  if (!made) return nullptr;
  auto plugin = std::make_unique<PluginV3>(*creator.v3, made);
  crash = plugin->problem();
  return crash.empty() ? std::move(plugin) : nullptr;
}
std::unique_ptr<Plugin> wrap(const Creator& creator, nvinfer1::IPluginV2* made) {
  if (!made) return nullptr;
  return std::make_unique<PluginV2>(*creator.v2, made);
}

// An answer as text, kept until the next one.
std::string answer;

}  // namespace

extern "C" {

// libnvinfer's: where plugins of TensorRT 8 log.
__attribute__((visibility("default"))) nvinfer1::ILogger* getLogger() noexcept { return &messages; }

// ---- the library ----
Host* host_open(const char* path, const char* entry) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return crash = dlerror(), nullptr;
  if (auto* set = symbol<void(nvinfer1::ILoggerFinder*)>(library, "setLoggerFinder")) set(&finder);
  int32_t count = 0;
  auto* all = symbol<nvinfer1::IPluginCreatorInterface* const*(int32_t&)>(library, entry);
  if (!all) return crash = dlerror(), nullptr;
  auto* host = new Host;
  // getPluginCreators has IPluginCreator*, of which an interface pointer is the single base.
  nvinfer1::IPluginCreatorInterface* const* creators = all(count);
  for (int i = 0; i < count; ++i) host->creators.emplace_back(creators[i]);
  return host;
}
// What went wrong since it was last asked: a crash, or why nothing was opened.
const char* host_crash() {
  answer = std::exchange(crash, "");
  return answer.c_str();
}
int host_messages() { return static_cast<int>(messages.lines.size()); }
const char* host_message(int i, int* severity) {
  *severity = messages.lines[i].first;
  return messages.lines[i].second.c_str();
}
void host_forget_messages() { messages.lines.clear(); }

// ---- creators ----
int creator_count(const Host* host) { return static_cast<int>(host->creators.size()); }
int creator_interface(const Host* host, int i) {
  const Creator& creator = host->creators[i];
  return creator.v3 ? 3 : creator.v2 ? 2 : 0;
}
const char* creator_name(const Host* host, int i) {
  return host->creators[i].either([](auto& c) { return c.getPluginName(); });
}
const char* creator_version(const Host* host, int i) {
  return host->creators[i].either([](auto& c) { return c.getPluginVersion(); });
}
const char* creator_namespace(const Host* host, int i) {
  return host->creators[i].either([](auto& c) { return c.getPluginNamespace(); });
}
const PluginFieldCollection* creator_fields(const Host* host, int i) {
  return host->creators[i].either([](auto& c) { return c.getFieldNames(); });
}
void creator_set_namespace(const Host* host, int i, const char* name) {
  if (host->creators[i].v2) host->creators[i].v2->setPluginNamespace(name);
}
Plugin* creator_create(const Host* host, int i, const char* layer,
                       const PluginFieldCollection* fields, int phase) {
  const Creator& creator = host->creators[i];
  return guarded(static_cast<Plugin*>(nullptr), [&] {
    if (creator.v3)
      return wrap(creator, creator.v3->createPlugin(layer, fields,
                                                    static_cast<nvinfer1::TensorRTPhase>(phase)))
          .release();
    return wrap(creator, creator.v2->createPlugin(layer, fields)).release();
  });
}
Plugin* creator_deserialize(const Host* host, int i, const void* bytes, size_t size) {
  const Creator& creator = host->creators[i];
  return guarded(static_cast<Plugin*>(nullptr), [&] {
    return wrap(creator, creator.v2->deserializePlugin("layer", bytes, size)).release();
  });
}

// ---- plugins; statuses are what the plugin answers, 0 for success, or kCrashed ----
constexpr int kCrashed = -12345;

void plugin_destroy(Plugin* plugin) {
  guarded(0, [&] { return delete plugin, 0; });
}
const char* plugin_identity(Plugin* plugin) {
  answer = guarded(std::string(), [&] { return plugin->identity(); });
  return answer.c_str();
}
int plugin_outputs(Plugin* plugin) {
  return guarded(kCrashed, [&] { return plugin->outputs(); });
}
int plugin_output_types(Plugin* plugin, int32_t* out, int outputs, const int32_t* in, int inputs) {
  return guarded(kCrashed, [&] {
    return plugin->output_types(reinterpret_cast<DataType*>(out), outputs,
                                reinterpret_cast<const DataType*>(in), inputs);
  });
}
// dynamic: for each input, a bit for each axis whose size is known at run time only.
int plugin_output_shapes(Plugin* plugin, Dims* out, int outputs, const Dims* in,
                         const uint32_t* dynamic, int inputs) {
  return guarded(kCrashed, [&] {
    ExpressionBuilder builder;
    std::vector<nvinfer1::DimsExprs> given, made(static_cast<size_t>(outputs));
    for (int i = 0; i < inputs; ++i) given.push_back(builder.sizes(in[i], dynamic[i]));
    const int status = plugin->output_shapes(made.data(), outputs, given.data(), inputs, builder);
    for (int i = 0; i < outputs && !status; ++i) out[i] = builder.evaluate(made[i]);
    return status;
  });
}
int plugin_supports(Plugin* plugin, int position, const DynamicPluginTensorDesc* all, int inputs,
                    int outputs) {
  return guarded(kCrashed,
                 [&]() -> int { return plugin->supports(position, {all, inputs, outputs}); });
}
// Every combination of types and formats that the plugin takes, as pairs, one combination after
// another; how many there are, at most one more than `most`. -1 if an answer depends on what comes
// after its position.
int plugin_combinations(Plugin* plugin, const DynamicPluginTensorDesc* all, int inputs, int outputs,
                        int32_t* pairs, int most) {
  constexpr int kTypes = 12, kFormats = 13;
  constexpr DataType kLater[] = {DataType::kFLOAT, DataType::kHALF, DataType::kINT64};
  const int count = inputs + outputs;
  return guarded(kCrashed, [&] {
    std::vector<DynamicPluginTensorDesc> tensors(all, all + count);
    int found = 0;
    bool looked_ahead = false;
    const auto answers = [&](int position) {
      int yes = 0;
      for (const DataType later : kLater) {
        for (int i = position + 1; i < count; ++i) {
          tensors[i].desc.type = later;
          tensors[i].desc.format = later == DataType::kFLOAT ? nvinfer1::TensorFormat::kLINEAR
                                                             : nvinfer1::TensorFormat::kCHW32;
        }
        yes += plugin->supports(position, {tensors.data(), inputs, outputs});
      }
      if (yes % 3) looked_ahead = true;
      return yes == 3;
    };
    const auto descend = [&](const auto& self, int position) -> void {
      if (found > most) return;
      if (position == count) {
        for (int i = 0; found < most && i < count; ++i) {
          *pairs++ = static_cast<int32_t>(tensors[i].desc.type);
          *pairs++ = static_cast<int32_t>(tensors[i].desc.format);
        }
        ++found;
        return;
      }
      for (int type = 0; type < kTypes; ++type)
        for (int format = 0; format < kFormats; ++format) {
          tensors[position].desc.type = static_cast<DataType>(type);
          tensors[position].desc.format = static_cast<nvinfer1::TensorFormat>(format);
          if (answers(position)) self(self, position + 1);
        }
    };
    descend(descend, 0);
    return looked_ahead ? -1 : found;
  });
}
int plugin_configure(Plugin* plugin, const DynamicPluginTensorDesc* all, int inputs, int outputs) {
  return guarded(kCrashed, [&] { return plugin->configure({all, inputs, outputs}); });
}
size_t plugin_workspace(Plugin* plugin, const DynamicPluginTensorDesc* all, int inputs,
                        int outputs) {
  return guarded(SIZE_MAX, [&] { return plugin->workspace({all, inputs, outputs}); });
}
int plugin_aliased_input(Plugin* plugin, int output) {
  return guarded(kCrashed, [&] { return plugin->aliased_input(output); });
}
const char* plugin_timing_cache_id(Plugin* plugin) {
  return guarded(static_cast<const char*>(nullptr), [&] { return plugin->timing_cache_id(); });
}
int plugin_shape_change(Plugin* plugin, const PluginTensorDesc* all, int inputs, int outputs) {
  return guarded(kCrashed, [&] { return plugin->shape_change(all, inputs, outputs); });
}
int plugin_enqueue(Plugin* plugin, const PluginTensorDesc* all, int inputs, const void* const* in,
                   void* const* out, void* workspace, cudaStream_t stream) {
  return guarded(kCrashed,
                 [&] { return plugin->enqueue(all, inputs, in, out, workspace, stream); });
}
// What the plugin writes into an engine: its size, and a copy of it.
size_t plugin_serialized(Plugin* plugin, char* bytes, size_t most) {
  const std::string text = guarded(std::string(), [&] { return plugin->serialized(); });
  std::memcpy(bytes, text.data(), std::min(most, text.size()));
  return text.size();
}
Plugin* plugin_recreated(Plugin* plugin) {
  return guarded(static_cast<Plugin*>(nullptr), [&] { return plugin->recreated().release(); });
}
Plugin* plugin_cloned(Plugin* plugin) {
  return guarded(static_cast<Plugin*>(nullptr), [&] { return plugin->cloned().release(); });
}
Plugin* plugin_attached(Plugin* plugin) {
  return guarded(static_cast<Plugin*>(nullptr), [&] { return plugin->attached().release(); });
}
}
