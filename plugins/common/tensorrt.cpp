#include "tensorrt.hpp"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#define TEXT_OF(x) #x
#define VALUE_OF(x) TEXT_OF(x)

namespace edgepool {
namespace plugin {

// Python loads TensorRT where other libraries do not see it.
void* tensorrt_function(const char* name) {
  if (void* found = dlsym(RTLD_DEFAULT, name)) return found;
  void* library = dlopen("libnvinfer.so." VALUE_OF(NV_TENSORRT_MAJOR), RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return nullptr;
  void* found = dlsym(library, name);
  dlclose(library);  // it is still open elsewhere
  return found;
}

// ---- the log ----
#if !EDGEPOOL_USES_V2
namespace {
std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};
}  // namespace
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept { logger_finder.store(finder); }
#endif

namespace {

nvinfer1::ILogger* logger() noexcept {
#if !EDGEPOOL_USES_V2
  try {
    if (nvinfer1::ILoggerFinder* finder = logger_finder.load())
      if (nvinfer1::ILogger* found = finder->findLogger()) return found;
  } catch (...) { return nullptr; }
#endif
  const auto get = reinterpret_cast<nvinfer1::ILogger* (*)()>(tensorrt_function("getLogger"));
  return get ? get() : nullptr;
}

}  // namespace

void log_error(const char* text) noexcept {
  if (nvinfer1::ILogger* log = logger())
    log->log(nvinfer1::ILogger::Severity::kERROR, text);
  else
    std::fprintf(stderr, "%s\n", text);
}

// ---- tensors ----
Element element_of(nvinfer1::DataType type) {
  if (type == nvinfer1::DataType::kFLOAT) return Element::f32;
  if (type == nvinfer1::DataType::kHALF) return Element::f16;
  if (type == nvinfer1::DataType::kINT8) return Element::s8;
  return type == nvinfer1::DataType::kINT32 ? Element::i32 : Element::other;
}
nvinfer1::DataType data_type_of(Element element) {
  if (element == Element::f16) return nvinfer1::DataType::kHALF;
  if (element == Element::s8) return nvinfer1::DataType::kINT8;
  return element == Element::i32 ? nvinfer1::DataType::kINT32 : nvinfer1::DataType::kFLOAT;
}

namespace {

View view_of_dims(const nvinfer1::Dims& dims, const nvinfer1::PluginTensorDesc& tensor) {
  View view{};
  view.rank = dims.nbDims;
  for (int i = 0; i < dims.nbDims && i < kMaxRank; ++i)
    view.dims[i] = static_cast<int64_t>(dims.d[i]);
  view.type = element_of(tensor.type);
  view.linear = tensor.format == nvinfer1::TensorFormat::kLINEAR;
  return view;
}

}  // namespace

View view_of(const nvinfer1::PluginTensorDesc& tensor) { return view_of_dims(tensor.dims, tensor); }
View view_of(const nvinfer1::DynamicPluginTensorDesc& tensor) {
  View view = view_of_dims(tensor.max, tensor.desc);
  for (int i = 0; i < view.rank && i < kMaxRank; ++i)
    view.open[i] = tensor.desc.dims.nbDims != view.rank || tensor.desc.dims.d[i] < 0 ||
                   tensor.min.d[i] != tensor.max.d[i];
  return view;
}

// ---- attributes ----
namespace {

nvinfer1::PluginFieldType field_type(const Attribute& a) {
  if (a.type == Attribute::choice) return nvinfer1::PluginFieldType::kCHAR;
  return a.type == Attribute::number ? nvinfer1::PluginFieldType::kFLOAT32
                                     : nvinfer1::PluginFieldType::kINT32;
}

void add_expected(const Attribute& a, Message& message) {
  if (a.type == Attribute::choice) {
    message.add("expected ");
    for (int i = 0; i < kMaxChoices && a.choices[i]; ++i)
      message.add("%s%s", i ? " or " : "", a.choices[i]);
  } else {
    message.add(a.type == Attribute::number ? "expected one float" : "expected one integer");
  }
}

// The index of the choice that these characters, which may end with zeros, name; -1: none.
int32_t choice_of(const Attribute& a, const char* text, int32_t length) {
  size_t n = static_cast<size_t>(length);
  while (n > 0 && text[n - 1] == 0) --n;
  for (int32_t i = 0; i < kMaxChoices && a.choices[i]; ++i)
    if (std::strlen(a.choices[i]) == n && std::memcmp(a.choices[i], text, n) == 0) return i;
  return -1;
}

const nvinfer1::PluginField* find(const nvinfer1::PluginFieldCollection& fields, const char* name) {
  for (int32_t i = 0; i < fields.nbFields; ++i)
    if (fields.fields[i].name && std::strcmp(fields.fields[i].name, name) == 0)
      return &fields.fields[i];
  return nullptr;
}

Message& begin(const Instance& plugin, const Attribute& a, Message& message) {
  message.add("%s", plugin.op->name);
  if (plugin.layer[0]) message.add(" (layer '%s')", plugin.layer);
  return message.add(": attribute %s: ", a.name);
}

bool parse_field(const nvinfer1::PluginField* field, const Attribute& a, Instance& plugin,
                 Message& message) {
  if (!field) {
    add_expected(a, begin(plugin, a, message));
    return message.refuse(", it is missing");
  }
  const bool text = a.type == Attribute::choice;
  if (field->type != field_type(a) || !field->data ||
      (text ? field->length < 1 || field->length > 64 : field->length != 1)) {
    add_expected(a, begin(plugin, a, message));
    return message.refuse(", got %d values of field type %d", field->length,
                          static_cast<int>(field->type));
  }
  int32_t bits;
  if (text) {
    bits = choice_of(a, static_cast<const char*>(field->data), field->length);
    if (bits < 0) {
      add_expected(a, begin(plugin, a, message));
      return message.refuse(", got '%.*s'", field->length, static_cast<const char*>(field->data));
    }
  } else {
    std::memcpy(&bits, field->data, sizeof bits);
  }
  set_attribute_bits(plugin, a, bits);
  return check_attribute(plugin, a, message);
}

}  // namespace

bool parse_fields(const nvinfer1::PluginFieldCollection* fields, Instance& plugin,
                  Message& message) {
  if (!fields || fields->nbFields < 0 || (fields->nbFields > 0 && !fields->fields))
    return message.refuse("%s: there are no attributes", plugin.op->name);
  for (const Attribute& a : plugin.op->attributes)
    if (!parse_field(find(*fields, a.name), a, plugin, message)) return false;
  return true;
}

void Fields::describe(const Operator& op) {
  for (int i = 0; i < op.attributes.count; ++i) {
    const Attribute& a = op.attributes[i];
    items[i] = nvinfer1::PluginField(a.name, nullptr, field_type(a), 1);
  }
  collection.nbFields = op.attributes.count;
  collection.fields = items;
}
void Fields::describe(const Instance& plugin) {
  describe(*plugin.op);
  for (int i = 0; i < plugin.op->attributes.count; ++i) {
    const Attribute& a = plugin.op->attributes[i];
    if (a.type == Attribute::choice) {
      const char* choice = a.choices[attribute_bits(plugin, a)];
      items[i].data = choice, items[i].length = static_cast<int32_t>(std::strlen(choice));
    } else {
      items[i].data = plugin.attributes.bytes + a.offset;
    }
  }
}

// ---- shapes ----
namespace {

// An extent of the inputs that has this size; null where there is none.
const nvinfer1::IDimensionExpr* extent_of(const Operator& op, int32_t size,
                                          const nvinfer1::DimsExprs* inputs) {
  for (int i = 0; i < op.inputs.count; ++i) {
    const Tensor& tensor = op.inputs[i];
    if (inputs[i].nbDims != tensor.rank) continue;  // unused
    for (int axis = 0; axis < tensor.rank; ++axis)
      if (tensor.shape[axis].of == Axis::size && tensor.shape[axis].value == size)
        return inputs[i].d[axis];
  }
  return nullptr;
}

bool may_be_unused(const Tensor& tensor) { return tensor.scales || tensor.without >= 0; }

bool check_ranks(const Instance& plugin, const nvinfer1::DimsExprs* inputs, int32_t count,
                 Message& message) {
  const Operator& op = *plugin.op;
  if (!inputs || count != op.inputs.count)
    return message.refuse("%s: expected %d inputs, got %d", op.name, op.inputs.count,
                          inputs ? count : 0);
  for (int i = 0; i < count; ++i) {
    const int rank = inputs[i].nbDims, expected = op.inputs[i].rank;
    if (rank == expected || (rank == 1 && may_be_unused(op.inputs[i]))) continue;
    return message.refuse("%s (layer '%s'): input %s: expected %d dimensions, got %d", op.name,
                          plugin.layer, op.inputs[i].name, expected, rank);
  }
  return true;
}

}  // namespace

bool output_shape(const Instance& plugin, int32_t output, const nvinfer1::DimsExprs* inputs,
                  int32_t count, nvinfer1::IExprBuilder& builder, nvinfer1::DimsExprs& shape,
                  Message& message) {
  const Operator& op = *plugin.op;
  if (!check_ranks(plugin, inputs, count, message)) return false;
  if (output < 0 || output >= op.outputs.count)
    return message.refuse("%s: there is no output %d", op.name, output);
  const Tensor& tensor = op.outputs[output];
  if (tensor.alias >= 0) {
    shape = inputs[tensor.alias];
    return true;
  }
  shape.nbDims = tensor.rank;
  for (int i = 0; i < tensor.rank; ++i) {
    const Axis& axis = tensor.shape[i];
    if (axis.of == Axis::size)
      shape.d[i] = extent_of(op, axis.value, inputs);
    else
      shape.d[i] = builder.constant(
          axis.of == Axis::number ? axis.value : attribute_bits(plugin, op.attributes[axis.value]));
    if (!shape.d[i])
      return message.refuse("%s: output %s: the extent of dimension %d is unknown", op.name,
                            tensor.name, i);
  }
  return true;
}

}  // namespace plugin
}  // namespace edgepool
