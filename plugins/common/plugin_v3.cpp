// The operators as IPluginV3, for TensorRT 10 and later.
#include "tensorrt.hpp"

#if !EDGEPOOL_USES_V2

#include <cstdlib>
#include <cstring>
#include <new>

namespace edgepool {
namespace plugin {

// State that a plugin updates in place, since TensorRT 10.3.
#if NV_TENSORRT_MAJOR > 10 || NV_TENSORRT_MINOR >= 3
using Build = nvinfer1::IPluginV3OneBuildV2;
#define EDGEPOOL_ALIASED_IO 1
#else
using Build = nvinfer1::IPluginV3OneBuild;
#define EDGEPOOL_ALIASED_IO 0
#endif

class PluginV3 final : public nvinfer1::IPluginV3,
                       public nvinfer1::IPluginV3OneCore,
                       public Build,
                       public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit PluginV3(const Instance& instance) : instance_(instance) {
    fields_.describe(instance_);
    write_attributes(instance_, attributes_, sizeof attributes_);
  }
  PluginV3(const PluginV3&) = delete;
  PluginV3& operator=(const PluginV3&) = delete;

  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<Build*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }
  PluginV3* clone() noexcept override { return new (std::nothrow) PluginV3(instance_); }

  // ---- core ----
  const char* getPluginName() const noexcept override { return op().name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  // ---- build ----
  int32_t getNbOutputs() const noexcept override { return op().outputs.count; }

  int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t n_outputs,
                             const nvinfer1::DataType* inputs,
                             int32_t n_inputs) const noexcept override {
    return status([&](Message& message) {
      if (!outputs || !inputs || n_outputs != op().outputs.count || n_inputs != op().inputs.count)
        return message.refuse("%s: expected %d inputs and %d outputs", op().name, op().inputs.count,
                              op().outputs.count);
      Element types[kMaxTensors];
      for (int i = 0; i < n_inputs; ++i) types[i] = element_of(inputs[i]);
      for (int i = 0; i < n_outputs; ++i) {
        Element type;
        if (!output_type(instance_, i, types, n_inputs, type, message)) return false;
        outputs[i] = data_type_of(type);
      }
      return true;
    });
  }

  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t n_inputs,
                          const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* outputs,
                          int32_t n_outputs, nvinfer1::IExprBuilder& builder) noexcept override {
    return status([&](Message& message) {
      if (!outputs || n_outputs != op().outputs.count)
        return message.refuse("%s: expected %d outputs", op().name, op().outputs.count);
      for (int i = 0; i < n_outputs; ++i)
        if (!output_shape(instance_, i, inputs, n_inputs, builder, outputs[i], message))
          return false;
      return true;
    });
  }

  bool supportsFormatCombination(int32_t at, const nvinfer1::DynamicPluginTensorDesc* tensors,
                                 int32_t n_inputs, int32_t n_outputs) noexcept override {
    if (!tensors || n_inputs != op().inputs.count || n_outputs != op().outputs.count) return false;
    if (at < 0 || at >= n_inputs + n_outputs) return false;
    View views[2 * kMaxTensors];  // those after `at` are not yet known
    for (int i = 0; i <= at; ++i) views[i] = view_of(tensors[i].desc);
    return supports(op(), at, views, n_inputs, n_outputs);
  }

  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t n_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* outputs,
                          int32_t n_outputs) noexcept override {
    Prepared prepared;
    return status([&](Message& message) {
      return prepared_for(inputs, n_inputs, outputs, n_outputs, true, prepared, message);
    });
  }

  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t n_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* outputs,
                          int32_t n_outputs) const noexcept override {
    Prepared prepared;
    const bool done = succeeds(op(), [&](Message& message) {
      return prepared_for(inputs, n_inputs, outputs, n_outputs, true, prepared, message);
    });
    return done ? prepared.workspace_bytes : 0;
  }

  // Beside name, version, shapes and formats, which TensorRT adds.
  const char* getTimingCacheID() noexcept override { return attributes_; }
  const char* getMetadataString() noexcept override { return attributes_; }

#if EDGEPOOL_ALIASED_IO
  int32_t getAliasedInput(int32_t output) noexcept override {
    return output >= 0 && output < op().outputs.count ? op().outputs[output].alias : -1;
  }
#endif

  // ---- runtime ----
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t n_inputs,
                        const nvinfer1::PluginTensorDesc* outputs,
                        int32_t n_outputs) noexcept override {
    Prepared prepared;
    return status([&](Message& message) {
      return prepared_for(inputs, n_inputs, outputs, n_outputs, false, prepared, message);
    });
  }

  int32_t enqueue(const nvinfer1::PluginTensorDesc* inputs,
                  const nvinfer1::PluginTensorDesc* outputs, void const* const* input_pointers,
                  void* const* output_pointers, void* workspace,
                  cudaStream_t stream) noexcept override {
    return status([&](Message& message) {
      Views in, out;
      return views_of(op(), inputs, op().inputs.count, in, message) &&
             views_of(op(), outputs, op().outputs.count, out, message) &&
             plugin::enqueue(instance_, in.items, out.items, input_pointers, output_pointers,
                             workspace, stream, message);
    });
  }

  // Nothing belongs to a context: all that a plugin has are its attributes.
  PluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override {
    return &fields_.collection;
  }

 private:
  const Operator& op() const { return *instance_.op; }

  template <class F>
  int32_t status(F f) const noexcept {
    return succeeds(op(), f) ? 0 : -1;
  }
  template <class Desc>
  bool prepared_for(const Desc* inputs, int32_t n_inputs, const Desc* outputs, int32_t n_outputs,
                    bool bounds, Prepared& prepared, Message& message) const {
    Views in, out;
    return views_of(op(), inputs, n_inputs, in, message) &&
           views_of(op(), outputs, n_outputs, out, message) &&
           prepare(instance_, in.items, n_inputs, out.items, n_outputs, bounds, prepared, message);
  }

  Instance instance_;
  Fields fields_;
  char attributes_[256];
};

class CreatorV3 final : public nvinfer1::IPluginCreatorV3One {
 public:
  void create(const Operator& op) {
    op_ = &op;
    fields_.describe(op);
  }

  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    Instance instance;
    instance.op = op_;
    instance.name_layer(name);
    const bool parsed =
        succeeds(*op_, [&](Message& message) { return parse_fields(fields, instance, message); });
    return parsed ? new (std::nothrow) PluginV3(instance) : nullptr;
  }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override {
    return &fields_.collection;
  }
  const char* getPluginName() const noexcept override { return op_->name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  const Operator* op_ = nullptr;
  Fields fields_;
};

namespace {

struct Creators {
  CreatorV3 items[kMaxOperators];
  nvinfer1::IPluginCreatorInterface* pointers[kMaxOperators];
  int32_t count;

  Creators() {
    const Operator* const* all = operators(count);
    for (int i = 0; i < count; ++i) {
      items[i].create(*all[i]);
      pointers[i] = &items[i];
    }
  }
};

// Triton's TensorRT backend only opens a library, and getCreators is not called. Not by default:
// the registry refuses a creator that it has already.
void register_creator(const Operator& op) {
  static CreatorV3 all[kMaxOperators];
  static int32_t count = 0;
  CreatorV3& creator = all[count++];
  creator.create(op);
  const auto registry_of_process =
      reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(tensorrt_function("getPluginRegistry"));
  if (registry_of_process) registry_of_process()->registerCreator(creator, kNamespace);
}

struct Registration {
  Registration() {
    const char* asked = std::getenv("EDGEPOOL_REGISTER_PLUGINS");
    if (asked && std::strcmp(asked, "1") == 0) on_operator(register_creator);
  }
};
const Registration registration;

}  // namespace

}  // namespace plugin
}  // namespace edgepool

// What the plugin registry looks for in a library.
extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const*
getCreators(int32_t& count) {
  static edgepool::plugin::Creators creators;
  count = creators.count;
  return creators.pointers;
}
extern "C" __attribute__((visibility("default"))) void setLoggerFinder(
    nvinfer1::ILoggerFinder* finder) {
  edgepool::plugin::set_logger_finder(finder);
}

#endif
