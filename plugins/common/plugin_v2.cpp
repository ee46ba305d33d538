// The operators as IPluginV2DynamicExt, for TensorRT 8.5. Only what that version has is used:
// tests/plugins/tensorrt_8_5_api.txt lists it.
#include "tensorrt.hpp"

#if EDGEPOOL_USES_V2

#include <cstring>
#include <new>

// What 8.5 has, later versions call deprecated.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace edgepool {
namespace plugin {

namespace {

// ---- serialised plugins ----
// Four 4-byte words, then 4 bytes an attribute in the order of the description; a choice is its
// index. kFormat is counted up when that, or the attributes of an operator, change.
constexpr uint32_t kMagic = 0x4c504745;  // "EGPL" on these machines, all little-endian
constexpr uint32_t kFormat = 1;

struct Header {
  uint32_t magic, format, operator_digest, attributes;
};

// FNV-1a of the name, so that bytes of one operator are not taken for another's.
uint32_t digest_of(const char* name) {
  uint32_t digest = 2166136261u;
  for (; *name; ++name) digest = (digest ^ static_cast<unsigned char>(*name)) * 16777619u;
  return digest;
}
Header header_of(const Operator& op) {
  return {kMagic, kFormat, digest_of(op.name), static_cast<uint32_t>(op.attributes.count)};
}
size_t serialized_size(const Operator& op) {
  return sizeof(Header) + sizeof(int32_t) * static_cast<size_t>(op.attributes.count);
}

void write(const Instance& plugin, void* buffer) {
  char* to = static_cast<char*>(buffer);
  const Header header = header_of(*plugin.op);
  std::memcpy(to, &header, sizeof header);
  to += sizeof header;
  for (const Attribute& a : plugin.op->attributes) {
    const int32_t bits = attribute_bits(plugin, a);
    std::memcpy(to, &bits, sizeof bits);
    to += sizeof bits;
  }
}

bool read(const void* data, size_t size, Instance& plugin, Message& message) {
  const Operator& op = *plugin.op;
  if (!data || size != serialized_size(op))
    return message.refuse("%s: a serialised plugin has %zu bytes, got %zu", op.name,
                          serialized_size(op), data ? size : size_t{0});
  Header header;
  const Header expected = header_of(op);
  std::memcpy(&header, data, sizeof header);
  if (std::memcmp(&header, &expected, sizeof header) != 0)
    return message.refuse(
        "%s: the serialised plugin is of another operator or version (format %u, expected %u): "
        "build the engine again",
        op.name, header.format, expected.format);
  const char* from = static_cast<const char*>(data) + sizeof header;
  for (const Attribute& a : op.attributes) {
    int32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    from += sizeof bits;
    set_attribute_bits(plugin, a, bits);
    if (!check_attribute(plugin, a, message)) return false;
  }
  return true;
}

// A namespace that a plugin was told to be in.
struct Namespace {
  char text[64];
  void set(const char* name) {
    std::strncpy(text, name ? name : "", sizeof text - 1);
    text[sizeof text - 1] = 0;
  }
};

}  // namespace

class PluginV2 final : public nvinfer1::IPluginV2DynamicExt {
 public:
  PluginV2(const Instance& instance, const Namespace& name) : instance_(instance), name_(name) {}
  PluginV2(const PluginV2&) = delete;
  PluginV2& operator=(const PluginV2&) = delete;

  // ---- IPluginV2 ----
  const char* getPluginType() const noexcept override { return op().name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  int32_t getNbOutputs() const noexcept override { return op().outputs.count; }
  int32_t initialize() noexcept override { return 0; }
  void terminate() noexcept override {}
  size_t getSerializationSize() const noexcept override { return serialized_size(op()); }
  void serialize(void* buffer) const noexcept override {
    if (buffer) write(instance_, buffer);
  }
  void destroy() noexcept override { delete this; }
  void setPluginNamespace(const char* name) noexcept override { name_.set(name); }
  const char* getPluginNamespace() const noexcept override { return name_.text; }

  // ---- IPluginV2Ext ----
  nvinfer1::DataType getOutputDataType(int32_t output, const nvinfer1::DataType* inputs,
                                       int32_t n_inputs) const noexcept override {
    Element type = Element::f32;
    succeeds(op(), [&](Message& message) {
      if (!inputs || n_inputs != op().inputs.count)
        return message.refuse("%s: expected %d inputs, got %d", op().name, op().inputs.count,
                              inputs ? n_inputs : 0);
      Element types[kMaxTensors];
      for (int i = 0; i < n_inputs; ++i) types[i] = element_of(inputs[i]);
      return output_type(instance_, output, types, n_inputs, type, message);
    });
    return data_type_of(type);
  }

  // ---- IPluginV2DynamicExt ----
  PluginV2* clone() const noexcept override {
    return new (std::nothrow) PluginV2(instance_, name_);
  }

  nvinfer1::DimsExprs getOutputDimensions(int32_t output, const nvinfer1::DimsExprs* inputs,
                                          int32_t n_inputs,
                                          nvinfer1::IExprBuilder& builder) noexcept override {
    nvinfer1::DimsExprs shape{};
    const bool known = succeeds(op(), [&](Message& message) {
      return output_shape(instance_, output, inputs, n_inputs, builder, shape, message);
    });
    if (!known) shape.nbDims = -1;
    return shape;
  }

  bool supportsFormatCombination(int32_t at, const nvinfer1::PluginTensorDesc* tensors,
                                 int32_t n_inputs, int32_t n_outputs) noexcept override {
    if (!tensors || n_inputs != op().inputs.count || n_outputs != op().outputs.count) return false;
    if (at < 0 || at >= n_inputs + n_outputs) return false;
    View views[2 * kMaxTensors];  // those after `at` are not yet known
    for (int i = 0; i <= at; ++i) views[i] = view_of(tensors[i]);
    return supports(op(), at, views, n_inputs, n_outputs);
  }

  // It cannot refuse: the first enqueue will. But the reason is in the log when it is known.
  // With wildcards there are bounds; without, the extents are those of the execution to come.
  void configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t n_inputs,
                       const nvinfer1::DynamicPluginTensorDesc* outputs,
                       int32_t n_outputs) noexcept override {
    succeeds(op(), [&](Message& message) {
      Views in, out;
      Prepared prepared;
      if (!views_of(op(), inputs, n_inputs, in, message) ||
          !views_of(op(), outputs, n_outputs, out, message))
        return false;
      const bool bounds = has_wildcards(inputs, n_inputs) || has_wildcards(outputs, n_outputs);
      if (!bounds) {
        for (int i = 0; i < n_inputs; ++i) in.items[i] = view_of(inputs[i].desc);
        for (int i = 0; i < n_outputs; ++i) out.items[i] = view_of(outputs[i].desc);
      }
      return prepare(instance_, in.items, n_inputs, out.items, n_outputs, bounds, prepared,
                     message);
    });
  }

  // The extents are the largest of a profile.
  size_t getWorkspaceSize(const nvinfer1::PluginTensorDesc* inputs, int32_t n_inputs,
                          const nvinfer1::PluginTensorDesc* outputs,
                          int32_t n_outputs) const noexcept override {
    Prepared prepared;
    const bool known = succeeds(op(), [&](Message& message) {
      Views in, out;
      if (!views_of(op(), inputs, n_inputs, in, message) ||
          !views_of(op(), outputs, n_outputs, out, message))
        return false;
      for (View& view : in.items) view.open_all();
      for (View& view : out.items) view.open_all();
      return prepare(instance_, in.items, n_inputs, out.items, n_outputs, true, prepared, message);
    });
    return known ? prepared.workspace_bytes : 0;
  }

  int32_t enqueue(const nvinfer1::PluginTensorDesc* inputs,
                  const nvinfer1::PluginTensorDesc* outputs, void const* const* input_pointers,
                  void* const* output_pointers, void* workspace,
                  cudaStream_t stream) noexcept override {
    const bool done = succeeds(op(), [&](Message& message) {
      Views in, out;
      return views_of(op(), inputs, op().inputs.count, in, message) &&
             views_of(op(), outputs, op().outputs.count, out, message) &&
             plugin::enqueue(instance_, in.items, out.items, input_pointers, output_pointers,
                             workspace, stream, message);
    });
    return done ? 0 : -1;
  }

 private:
  const Operator& op() const { return *instance_.op; }

  static bool has_wildcards(const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t count) {
    for (int i = 0; i < count; ++i)
      for (int axis = 0; axis < tensors[i].desc.dims.nbDims && axis < kMaxRank; ++axis)
        if (tensors[i].desc.dims.d[axis] < 0) return true;
    return false;
  }

  Instance instance_;
  Namespace name_;
};

class CreatorV2 final : public nvinfer1::IPluginCreator {
 public:
  void create(const Operator& op) {
    op_ = &op;
    fields_.describe(op);
    name_.set(kNamespace);
  }

  const char* getPluginName() const noexcept override { return op_->name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override {
    return &fields_.collection;
  }
  nvinfer1::IPluginV2* createPlugin(
      const char* layer, const nvinfer1::PluginFieldCollection* fields) noexcept override {
    return make(layer, [&](Instance& instance, Message& message) {
      return parse_fields(fields, instance, message);
    });
  }
  nvinfer1::IPluginV2* deserializePlugin(const char* layer, const void* data,
                                         size_t size) noexcept override {
    return make(layer, [&](Instance& instance, Message& message) {
      return read(data, size, instance, message);
    });
  }
  void setPluginNamespace(const char* name) noexcept override { name_.set(name); }
  const char* getPluginNamespace() const noexcept override { return name_.text; }

 private:
  template <class F>
  nvinfer1::IPluginV2* make(const char* layer, F fill) const noexcept {
    Instance instance;
    instance.op = op_;
    instance.name_layer(layer);
    const bool filled = succeeds(*op_, [&](Message& message) { return fill(instance, message); });
    return filled ? new (std::nothrow) PluginV2(instance, name_) : nullptr;
  }

  const Operator* op_ = nullptr;
  Fields fields_;
  Namespace name_;
};

namespace {

struct Creators {
  CreatorV2 items[kMaxOperators];
  nvinfer1::IPluginCreator* pointers[kMaxOperators];
  int32_t count = 0;
};

Creators& creators() {
  static Creators all;
  return all;
}

// REGISTER_TENSORRT_PLUGIN registers in the empty namespace, where nodes that name one are not
// looked for.
void add_creator(const Operator& op) {
  Creators& all = creators();
  CreatorV2& creator = all.items[all.count];
  creator.create(op);
  all.pointers[all.count++] = &creator;
  const auto registry_of_process =
      reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(tensorrt_function("getPluginRegistry"));
  if (registry_of_process) registry_of_process()->registerCreator(creator, kNamespace);
}

// At load; TensorRT 8.5 asks a library for nothing.
struct Registration {
  Registration() { on_operator(add_creator); }
};
const Registration registration;

}  // namespace

}  // namespace plugin
}  // namespace edgepool

// For loaders of later TensorRT 8 versions, and for tests.
extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreator* const*
getPluginCreators(int32_t& count) {
  count = edgepool::plugin::creators().count;
  return edgepool::plugin::creators().pointers;
}

#endif
