// A plugin as TensorRT sees it, whichever of the two interfaces it has.
#pragma once
#include <NvInferRuntime.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "expressions.hpp"

namespace conformance {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

// Input and output descriptions are one array, outputs last.
struct Tensors {
  const DynamicPluginTensorDesc* all;
  int inputs, outputs;

  const DynamicPluginTensorDesc* out() const { return all + inputs; }
};

class Plugin {
 public:
  virtual ~Plugin() = default;
  virtual std::string identity() const = 0;  // namespace::name:version
  virtual int outputs() const = 0;
  virtual int output_types(DataType* out, int outputs, const DataType* in, int inputs) = 0;
  virtual int output_shapes(nvinfer1::DimsExprs* out, int outputs, const nvinfer1::DimsExprs* in,
                            int inputs, nvinfer1::IExprBuilder&) = 0;
  virtual bool supports(int position, const Tensors&) = 0;
  virtual int configure(const Tensors&) = 0;
  virtual size_t workspace(const Tensors&) = 0;
  virtual int aliased_input(int output) = 0;  // -1: none, or the interface does not know it
  virtual const char* timing_cache_id() = 0;
  virtual int shape_change(const PluginTensorDesc*, int inputs, int outputs) = 0;
  virtual int enqueue(const PluginTensorDesc*, int inputs, const void* const* in, void* const* out,
                      void* workspace, cudaStream_t) = 0;
  virtual std::string serialized() = 0;             // comparable bytes
  virtual std::unique_ptr<Plugin> recreated() = 0;  // from what it serialises
  virtual std::unique_ptr<Plugin> cloned() = 0;
  virtual std::unique_ptr<Plugin> attached() = 0;  // for an execution context
};

inline size_t field_bytes(const nvinfer1::PluginField& field) {
  using nvinfer1::PluginFieldType;
  const size_t length = static_cast<size_t>(field.length);
  switch (field.type) {
    case PluginFieldType::kINT32:
    case PluginFieldType::kFLOAT32: return 4 * length;
    case PluginFieldType::kINT64:
    case PluginFieldType::kFLOAT64: return 8 * length;
    case PluginFieldType::kFLOAT16:
    case PluginFieldType::kBF16:
    case PluginFieldType::kINT16: return 2 * length;
    case PluginFieldType::kDIMS: return sizeof(Dims) * length;
    default: return length;
  }
}

class PluginV3 final : public Plugin {
 public:
  PluginV3(nvinfer1::IPluginCreatorV3One& creator, nvinfer1::IPluginV3* plugin)
      : creator_(creator), plugin_(plugin) {
    using nvinfer1::PluginCapabilityType;
    core_ = as<nvinfer1::IPluginV3OneCore>(PluginCapabilityType::kCORE);
    build_ = as<nvinfer1::IPluginV3OneBuild>(PluginCapabilityType::kBUILD);
    runtime_ = as<nvinfer1::IPluginV3OneRuntime>(PluginCapabilityType::kRUNTIME);
  }

  // What is wrong with the capabilities; empty if nothing is.
  std::string problem() const {
    if (!core_ || !build_ || !runtime_) return "a capability interface is missing";
    if (std::strcmp(core_->getInterfaceInfo().kind, "PLUGIN_V3ONE_CORE") ||
        std::strcmp(build_->getInterfaceInfo().kind, "PLUGIN_V3ONE_BUILD") ||
        std::strcmp(runtime_->getInterfaceInfo().kind, "PLUGIN_V3ONE_RUNTIME"))
      return "a capability interface is of another kind";
    return "";
  }

  std::string identity() const override {
    return std::string(core_->getPluginNamespace()) + "::" + core_->getPluginName() + ":" +
           core_->getPluginVersion();
  }
  int outputs() const override { return build_->getNbOutputs(); }
  int output_types(DataType* out, int outputs, const DataType* in, int inputs) override {
    return build_->getOutputDataTypes(out, outputs, in, inputs);
  }
  int output_shapes(nvinfer1::DimsExprs* out, int outputs, const nvinfer1::DimsExprs* in,
                    int inputs, nvinfer1::IExprBuilder& builder) override {
    return build_->getOutputShapes(in, inputs, nullptr, 0, out, outputs, builder);
  }
  bool supports(int position, const Tensors& t) override {
    return build_->supportsFormatCombination(position, t.all, t.inputs, t.outputs);
  }
  int configure(const Tensors& t) override {
    return build_->configurePlugin(t.all, t.inputs, t.out(), t.outputs);
  }
  size_t workspace(const Tensors& t) override {
    return build_->getWorkspaceSize(t.all, t.inputs, t.out(), t.outputs);
  }
  int aliased_input(int output) override {
    if (build_->getInterfaceInfo().major < 2) return -1;
    return static_cast<nvinfer1::IPluginV3OneBuildV2*>(build_)->getAliasedInput(output);
  }
  const char* timing_cache_id() override { return build_->getTimingCacheID(); }
  int shape_change(const PluginTensorDesc* all, int inputs, int outputs) override {
    return runtime_->onShapeChange(all, inputs, all + inputs, outputs);
  }
  int enqueue(const PluginTensorDesc* all, int inputs, const void* const* in, void* const* out,
              void* workspace, cudaStream_t stream) override {
    return runtime_->enqueue(all, all + inputs, in, out, workspace, stream);
  }
  std::string serialized() override {
    std::string text;
    for (const nvinfer1::PluginField& f : fields()) {
      text += f.name + (":" + std::to_string(static_cast<int>(f.type))) + "=";
      text.append(static_cast<const char*>(f.data), field_bytes(f));
      text += ";";
    }
    return text;
  }
  std::unique_ptr<Plugin> recreated() override {
    // An engine holds copies, exactly as long as the fields.
    std::vector<nvinfer1::PluginField> copies = fields();
    std::vector<std::unique_ptr<char[]>> kept;
    const auto copy = [&](const void* from, size_t size) {
      kept.emplace_back(new char[size]);
      std::memcpy(kept.back().get(), from, size);
      return kept.back().get();
    };
    for (nvinfer1::PluginField& f : copies) {
      f.name = copy(f.name, std::strlen(f.name) + 1);
      f.data = copy(f.data, field_bytes(f));
    }
    const nvinfer1::PluginFieldCollection collection{static_cast<int>(copies.size()),
                                                     copies.data()};
    return wrap(creator_.createPlugin("layer", &collection, nvinfer1::TensorRTPhase::kRUNTIME));
  }
  std::unique_ptr<Plugin> cloned() override { return wrap(plugin_->clone()); }
  std::unique_ptr<Plugin> attached() override {
    struct : nvinfer1::IPluginResourceContext {
      nvinfer1::IGpuAllocator* getGpuAllocator() const noexcept override { return nullptr; }
      nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
    } context;
    return wrap(runtime_->attachToContext(&context));
  }

 private:
  template <class T>
  T* as(nvinfer1::PluginCapabilityType type) {
    return static_cast<T*>(plugin_->getCapabilityInterface(type));
  }
  std::unique_ptr<Plugin> wrap(nvinfer1::IPluginV3* plugin) {
    return plugin && plugin != plugin_.get() ? std::make_unique<PluginV3>(creator_, plugin)
                                             : nullptr;
  }
  std::vector<nvinfer1::PluginField> fields() {
    const nvinfer1::PluginFieldCollection* all = runtime_->getFieldsToSerialize();
    if (!all) return {};
    return {all->fields, all->fields + all->nbFields};
  }

  nvinfer1::IPluginCreatorV3One& creator_;
  std::unique_ptr<nvinfer1::IPluginV3> plugin_;
  nvinfer1::IPluginV3OneCore* core_;
  nvinfer1::IPluginV3OneBuild* build_;
  nvinfer1::IPluginV3OneRuntime* runtime_;
};

class PluginV2 final : public Plugin {
 public:
  using Interface = nvinfer1::IPluginV2DynamicExt;

  PluginV2(nvinfer1::IPluginCreator& creator, nvinfer1::IPluginV2* plugin)
      : creator_(creator), plugin_(static_cast<Interface*>(plugin)) {}
  ~PluginV2() override {
    if (initialized_) plugin_->terminate();
    plugin_->destroy();
  }

  std::string identity() const override {
    return std::string(plugin_->getPluginNamespace()) + "::" + plugin_->getPluginType() + ":" +
           plugin_->getPluginVersion();
  }
  int outputs() const override { return plugin_->getNbOutputs(); }
  int output_types(DataType* out, int outputs, const DataType* in, int inputs) override {
    for (int i = 0; i < outputs; ++i) out[i] = plugin_->getOutputDataType(i, in, inputs);
    return 0;
  }
  int output_shapes(nvinfer1::DimsExprs* out, int outputs, const nvinfer1::DimsExprs* in,
                    int inputs, nvinfer1::IExprBuilder& builder) override {
    for (int i = 0; i < outputs; ++i) out[i] = plugin_->getOutputDimensions(i, in, inputs, builder);
    return 0;
  }
  bool supports(int position, const Tensors& t) override {
    const auto all = descriptions(t, [](const DynamicPluginTensorDesc& d) { return d.desc.dims; });
    return plugin_->supportsFormatCombination(position, all.data(), t.inputs, t.outputs);
  }
  int configure(const Tensors& t) override {
    plugin_->configurePlugin(t.all, t.inputs, t.out(), t.outputs);
    return 0;
  }
  size_t workspace(const Tensors& t) override {
    const auto all = descriptions(t, [](const DynamicPluginTensorDesc& d) { return d.max; });
    return plugin_->getWorkspaceSize(all.data(), t.inputs, all.data() + t.inputs, t.outputs);
  }
  int aliased_input(int) override { return -1; }
  const char* timing_cache_id() override { return nullptr; }
  int shape_change(const PluginTensorDesc*, int, int) override { return 0; }
  int enqueue(const PluginTensorDesc* all, int inputs, const void* const* in, void* const* out,
              void* workspace, cudaStream_t stream) override {
    if (!initialized_ && plugin_->initialize()) return 1;
    initialized_ = true;
    return plugin_->enqueue(all, all + inputs, in, out, workspace, stream);
  }
  std::string serialized() override {
    const size_t size = plugin_->getSerializationSize();
    std::string text(size, '\0');
    // The heap holds the bytes alone, so that AddressSanitizer sees one too many.
    const std::unique_ptr<char[]> bytes(new char[size]);
    plugin_->serialize(bytes.get());
    text.assign(bytes.get(), size);
    return text;
  }
  std::unique_ptr<Plugin> recreated() override {
    const std::string text = serialized();
    const std::unique_ptr<char[]> bytes(new char[text.size()]);
    std::memcpy(bytes.get(), text.data(), text.size());
    return wrap(creator_.deserializePlugin("layer", bytes.get(), text.size()));
  }
  std::unique_ptr<Plugin> cloned() override { return wrap(plugin_->clone()); }
  std::unique_ptr<Plugin> attached() override {
    std::unique_ptr<Plugin> copy = cloned();
    if (copy) static_cast<PluginV2&>(*copy).plugin_->attachToContext(nullptr, nullptr, nullptr);
    return copy;
  }

 private:
  template <class F>
  static std::vector<PluginTensorDesc> descriptions(const Tensors& t, F&& shape) {
    std::vector<PluginTensorDesc> all;
    for (int i = 0; i < t.inputs + t.outputs; ++i) {
      all.push_back(t.all[i].desc);
      all.back().dims = shape(t.all[i]);
    }
    return all;
  }
  std::unique_ptr<Plugin> wrap(nvinfer1::IPluginV2* plugin) {
    return plugin && plugin != plugin_ ? std::make_unique<PluginV2>(creator_, plugin) : nullptr;
  }

  nvinfer1::IPluginCreator& creator_;
  Interface* plugin_;
  bool initialized_ = false;
};

}  // namespace conformance
