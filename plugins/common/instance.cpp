#include "instance.hpp"

#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace edgepool {
namespace plugin {

// ---- the table of operators ----
namespace {

const Operator* all[kMaxOperators];
int known = 0;
void (*listener)(const Operator&) = nullptr;

}  // namespace

const Operator* const* operators(int& count) {
  count = known;
  return all;
}
void on_operator(void (*f)(const Operator&)) {
  listener = f;
  for (int i = 0; i < known; ++i) f(*all[i]);
}
void add(const Operator& op) {
  all[known++] = &op;
  if (listener) listener(op);
}

// ---- messages ----
namespace {

void append(char* text, size_t size, int& length, const char* format, va_list arguments) {
  const size_t used = static_cast<size_t>(length);
  if (used + 1 >= size) return;
  const int n = std::vsnprintf(text + used, size - used, format, arguments);
  if (n < 0) return;
  length = used + static_cast<size_t>(n) < size ? length + n : static_cast<int>(size) - 1;
  // Names come from the graph: whatever they hold, a message is one line of ASCII.
  for (char* c = text + used; c < text + length; ++c)
    if (*c < ' ' || *c > '~') *c = '?';
}

}  // namespace

Message& Message::add(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  append(text_, sizeof text_, length_, format, arguments);
  va_end(arguments);
  return *this;
}
bool Message::refuse(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  append(text_, sizeof text_, length_, format, arguments);
  va_end(arguments);
  return false;
}

void Instance::name_layer(const char* name) {
  std::snprintf(layer, sizeof layer, "%s", name ? name : "");
}

namespace {

constexpr int64_t kTooMany = int64_t{1} << 31;  // elements of a TensorRT tensor

const char* name_of(Element type) {
  switch (type) {
    case Element::f32: return "float32";
    case Element::f16: return "float16";
    case Element::s8: return "int8";
    case Element::i32: return "int32";
    case Element::other: break;
  }
  return "another type";
}
size_t bytes_of(Element type) { return type == Element::s8 ? 1 : type == Element::f16 ? 2 : 4; }

int32_t get(const Image& params, size_t offset) {
  int32_t value;
  std::memcpy(&value, params.bytes + offset, sizeof value);
  return value;
}
void set(Image& params, size_t offset, int32_t value) {
  std::memcpy(params.bytes + offset, &value, sizeof value);
}

// Begins a message: "IndexPool (layer 'x'): ".
Message& of(const Instance& plugin, Message& message) {
  message.add("%s", plugin.op->name);
  if (plugin.layer[0]) message.add(" (layer '%s')", plugin.layer);
  return message.add(": ");
}
Message& of(const Instance& plugin, bool output, const Tensor& tensor, Message& message) {
  return of(plugin, message).add("%s %s: ", output ? "output" : "input", tensor.name);
}

}  // namespace

// ---- attributes ----
int32_t attribute_bits(const Instance& plugin, const Attribute& a) {
  return get(plugin.attributes, a.offset);
}
void set_attribute_bits(Instance& plugin, const Attribute& a, int32_t bits) {
  set(plugin.attributes, a.offset, bits);
}
double attribute_value(const Instance& plugin, const Attribute& a) {
  const int32_t bits = attribute_bits(plugin, a);
  if (a.type != Attribute::number) return bits;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return static_cast<double>(value);
}

bool check_attribute(const Instance& plugin, const Attribute& a, Message& message) {
  const double value = attribute_value(plugin, a);
  if (value >= a.low && value <= a.high) return true;
  of(plugin, message);
  if (a.type == Attribute::choice)
    return message.refuse("attribute %s: choice %g of %g", a.name, value, a.high + 1);
  if (a.high >= static_cast<double>(kMost))
    return message.refuse("attribute %s: expected %g or more, got %g", a.name, a.low, value);
  return message.refuse("attribute %s: expected %g to %g, got %g", a.name, a.low, a.high, value);
}

void write_attributes(const Instance& plugin, char* text, size_t size) {
  size_t used = 0;
  text[0] = 0;
  for (const Attribute& a : plugin.op->attributes) {
    if (used >= size) return;
    const char* separator = used ? ";" : "";
    int n = 0;
    if (a.type == Attribute::choice)
      n = std::snprintf(text + used, size - used, "%s%s=%s", separator, a.name,
                        a.choices[attribute_bits(plugin, a)]);
    else if (a.type == Attribute::integer)
      n = std::snprintf(text + used, size - used, "%s%s=%" PRId32, separator, a.name,
                        attribute_bits(plugin, a));
    else
      n = std::snprintf(text + used, size - used, "%s%s=%.9g", separator, a.name,
                        attribute_value(plugin, a));
    used += n > 0 ? static_cast<size_t>(n) : 0;
  }
}

// ---- types ----
namespace {

int first_of(const Operator& op, Kind kind) {
  for (int i = 0; i < op.inputs.count; ++i)
    if (op.inputs[i].kind == kind) return i;
  return -1;
}
const Tensor& tensor_at(const Operator& op, int at) {
  return at < op.inputs.count ? op.inputs[at] : op.outputs[at - op.inputs.count];
}

// Whether tensor `at` may be of its type; `type_of` gives the types of the inputs before it.
template <class F>
bool type_fits(const Operator& op, int at, Element type, F type_of) {
  const Kind kind = tensor_at(op, at).kind;
  if (kind == Kind::f32) return type == Element::f32;
  if (kind == Kind::i32) return type == Element::i32;
  const int first = first_of(op, kind);
  if (first >= 0 && first < at) return type == type_of(first);
  if (kind == Kind::T) return type == Element::f32 || type == Element::f16;
  return type == Element::s8 || type == type_of(first_of(op, Kind::T));
}

void expected_type(const Operator& op, int at, Message& message) {
  const Tensor& tensor = tensor_at(op, at);
  const int first = first_of(op, tensor.kind);
  if (tensor.kind == Kind::f32)
    message.add("expected float32");
  else if (tensor.kind == Kind::i32)
    message.add("expected int32");
  else if (first != at)
    message.add("expected the type of %s", op.inputs[first].name);
  else if (tensor.kind == Kind::T)
    message.add("expected float32 or float16");
  else
    message.add("expected int8, or the type of %s", op.inputs[first_of(op, Kind::T)].name);
}

bool check_counts(const Instance& plugin, int32_t inputs, int32_t outputs, Message& message) {
  const Operator& op = *plugin.op;
  if (inputs == op.inputs.count && outputs == op.outputs.count) return true;
  return of(plugin, message)
      .refuse("expected %d inputs and %d outputs, got %d and %d", op.inputs.count, op.outputs.count,
              inputs, outputs);
}

}  // namespace

bool supports(const Operator& op, int32_t at, const View* tensors, int32_t inputs,
              int32_t outputs) {
  if (inputs != op.inputs.count || outputs != op.outputs.count) return false;
  if (at < 0 || at >= inputs + outputs || !tensors[at].linear) return false;
  return type_fits(op, at, tensors[at].type, [&](int i) { return tensors[i].type; });
}

bool output_type(const Instance& plugin, int32_t output, const Element* inputs, int32_t count,
                 Element& type, Message& message) {
  const Operator& op = *plugin.op;
  if (!check_counts(plugin, count, op.outputs.count, message)) return false;
  if (output < 0 || output >= op.outputs.count)
    return of(plugin, message).refuse("there is no output %d", output);
  for (int i = 0; i < count; ++i)
    if (!type_fits(op, i, inputs[i], [&](int other) { return inputs[other]; })) {
      expected_type(op, i, of(plugin, false, op.inputs[i], message));
      return message.refuse(", got %s", name_of(inputs[i]));
    }
  const Kind kind = op.outputs[output].kind;
  type = kind == Kind::f32   ? Element::f32
         : kind == Kind::i32 ? Element::i32
                             : inputs[first_of(op, kind)];
  return true;
}

// ---- shapes ----
namespace {

struct Extents {
  int64_t value[kMaxSizes];  // -1: not yet known
  bool open[kMaxSizes];
};

bool is_unused(const Instance& plugin, const Tensor& tensor, const Image& params) {
  if (tensor.scales && get(params, plugin.op->storage) != static_cast<int32_t>(Element::s8))
    return true;
  return tensor.without >= 0 &&
         get(params, plugin.op->attributes[tensor.without].offset) == tensor.with_value;
}

void add_shape(const View& view, Message& message) {
  message.add("[");
  for (int i = 0; i < view.rank && i < kMaxRank; ++i)
    message.add("%s%" PRId64, i ? ", " : "", view.dims[i]);
  message.add("]");
}

int64_t fixed_extent(const Instance& plugin, const Axis& axis) {
  return axis.of == Axis::number ? axis.value
                                 : attribute_bits(plugin, plugin.op->attributes[axis.value]);
}

// "[B = 2, S, Hs = 3, 64]": names, and the extents that earlier tensors have given them.
void add_expected(const Instance& plugin, const Tensor& tensor, const Extents& extents,
                  Message& message) {
  message.add("expected [");
  for (int i = 0; i < tensor.rank; ++i) {
    const Axis& axis = tensor.shape[i];
    if (i) message.add(", ");
    if (axis.of == Axis::size) {
      message.add("%s", plugin.op->sizes[axis.value].name);
      if (extents.value[axis.value] >= 0) message.add(" = %" PRId64, extents.value[axis.value]);
    } else if (axis.of == Axis::attribute) {
      message.add("%s = %" PRId64, plugin.op->attributes[axis.value].name,
                  fixed_extent(plugin, axis));
    } else {
      message.add("%d", axis.value);
    }
  }
  message.add("]");
}

bool shape_refused(const Instance& plugin, bool output, const Tensor& tensor, const View& view,
                   const Extents& extents, Message& message) {
  add_expected(plugin, tensor, extents, of(plugin, output, tensor, message));
  message.add(", got ");
  add_shape(view, message);
  return false;
}

bool unused_refused(const Instance& plugin, bool output, const Tensor& tensor, const View& view,
                    Message& message) {
  of(plugin, output, tensor, message).add("expected [1], since it is not used with ");
  if (tensor.without >= 0) {
    const Attribute& a = plugin.op->attributes[tensor.without];
    if (a.type == Attribute::choice)
      message.add("%s = %s", a.name, a.choices[tensor.with_value]);
    else
      message.add("%s = %d", a.name, tensor.with_value);
  } else {
    message.add("pages that are not int8");
  }
  message.add(", got ");
  add_shape(view, message);
  return false;
}

// TensorRT tensors have fewer than 2^31 elements. Where pages make it too large, the message says
// how many would fit.
bool check_elements(const Instance& plugin, bool output, const Tensor& tensor, const View& view,
                    Message& message) {
  int64_t elements = 1;
  bool over = false;
  for (int i = 0; i < view.rank; ++i)
    over |= __builtin_mul_overflow(elements, view.dims[i], &elements);
  for (int i = 0; i < view.rank; ++i)
    if (view.dims[i] == 0) return true;
  if (!over && elements < kTooMany) return true;
  of(plugin, output, tensor, message);
  add_shape(view, message);
  message.add(" has 2^31 elements or more");
  for (int i = 0; i < tensor.rank; ++i) {
    const Axis& axis = tensor.shape[i];
    if (axis.of != Axis::size || std::strcmp(plugin.op->sizes[axis.value].name, "NP") != 0)
      continue;
    int64_t page = 1;
    bool page_over = false;
    for (int j = 0; j < view.rank; ++j)
      if (j != i) page_over |= __builtin_mul_overflow(page, view.dims[j], &page);
    if (!page_over && page < kTooMany)
      message.add(", which TensorRT cannot hold: the largest pool that fits has NP = %" PRId64
                  " pages",
                  (kTooMany - 1) / page);
  }
  return false;
}

bool match_shape(const Instance& plugin, bool output, const Tensor& tensor, const View& view,
                 bool bounds, const Image& params, Extents& extents, Message& message) {
  if (is_unused(plugin, tensor, params)) {
    return (view.rank == 1 && view.dims[0] == 1) ||
           unused_refused(plugin, output, tensor, view, message);
  }
  if (view.rank != tensor.rank)
    return shape_refused(plugin, output, tensor, view, extents, message);
  for (int i = 0; i < tensor.rank; ++i) {
    const Axis& axis = tensor.shape[i];
    const int64_t extent = view.dims[i];
    if (extent < 0 || extent > kMost)
      return shape_refused(plugin, output, tensor, view, extents, message);
    if (axis.of != Axis::size) {
      if (extent != fixed_extent(plugin, axis))
        return shape_refused(plugin, output, tensor, view, extents, message);
      continue;
    }
    int64_t& known_extent = extents.value[axis.value];
    bool& open = extents.open[axis.value];
    if (known_extent < 0) {
      known_extent = extent, open = view.open[i];
    } else if (known_extent != extent) {
      if (!bounds || !(open || view.open[i]))
        return shape_refused(plugin, output, tensor, view, extents, message);
      if (extent > known_extent) known_extent = extent;
      open = true;
    }
  }
  return check_elements(plugin, output, tensor, view, message);
}

bool match_types(const Instance& plugin, const View* inputs, const View* outputs, Image& params,
                 Message& message) {
  const Operator& op = *plugin.op;
  for (int i = 0; i < op.inputs.count + op.outputs.count; ++i) {
    const bool output = i >= op.inputs.count;
    const View& view = output ? outputs[i - op.inputs.count] : inputs[i];
    if (!type_fits(op, i, view.type, [&](int other) { return inputs[other].type; })) {
      expected_type(op, i, of(plugin, output, tensor_at(op, i), message));
      return message.refuse(", got %s", name_of(view.type));
    }
    if (!view.linear)
      return of(plugin, output, tensor_at(op, i), message).refuse("expected the linear format");
  }
  const int t = first_of(op, Kind::T), p = first_of(op, Kind::P);
  set(params, op.activation, static_cast<int32_t>(inputs[t].type));
  set(params, op.storage, static_cast<int32_t>(inputs[p].type));
  return true;
}

bool current_device(Device& device) {
  int id = 0, major = 0, minor = 0;
  if (cudaGetDevice(&id) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id) != cudaSuccess ||
      cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id) !=
          cudaSuccess)
    return false;
  device.sm = 10 * major + minor;
  return true;
}

}  // namespace

bool prepare(const Instance& plugin, const View* inputs, int32_t n_inputs, const View* outputs,
             int32_t n_outputs, bool bounds, Prepared& prepared, Message& message) {
  const Operator& op = *plugin.op;
  if (!check_counts(plugin, n_inputs, n_outputs, message)) return false;
  Image& params = prepared.params;
  params = plugin.attributes;
  if (!match_types(plugin, inputs, outputs, params, message)) return false;

  Extents extents;
  for (int i = 0; i < kMaxSizes; ++i) extents.value[i] = -1, extents.open[i] = false;
  for (int i = 0; i < n_inputs; ++i)
    if (!match_shape(plugin, false, op.inputs[i], inputs[i], bounds, params, extents, message))
      return false;
  for (int i = 0; i < n_outputs; ++i)
    if (!match_shape(plugin, true, op.outputs[i], outputs[i], bounds, params, extents, message))
      return false;
  for (int i = 0; i < op.sizes.count; ++i)  // a size of unused tensors only does not matter
    set(params, op.sizes[i].offset,
        extents.value[i] < 0 ? 0 : static_cast<int32_t>(extents.value[i]));

  if (!current_device(prepared.device))
    return of(plugin, message).refuse("there is no CUDA device");
  op.set_device(params.bytes, prepared.device);
  if (const char* problem = op.problem(params.bytes))
    return of(plugin, message).refuse("%s", problem);
  prepared.workspace_bytes = op.workspace_bytes(params.bytes);
  return true;
}

// ---- running ----
namespace {

size_t elements_of(const View& view) {
  size_t elements = 1;
  for (int i = 0; i < view.rank; ++i) elements *= static_cast<size_t>(view.dims[i]);
  return elements;
}

// The kernels load 16 bytes at a time.
bool check_pointer(const Instance& plugin, bool output, const Tensor& tensor, const View& view,
                   const void* pointer, Message& message) {
  if (elements_of(view) == 0) return true;
  if (!pointer) return of(plugin, output, tensor, message).refuse("the pointer is null");
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0 && elements_of(view) > 1)
    return of(plugin, output, tensor, message).refuse("the pointer is not aligned to 16 bytes");
  return true;
}

void set_pointer(Image& params, const Tensor& tensor, const void* pointer) {
  if (tensor.pointer >= 0) std::memcpy(params.bytes + tensor.pointer, &pointer, sizeof pointer);
}

bool fails(const Instance& plugin, cudaError_t error, const char* doing, Message& message) {
  if (error == cudaSuccess) return false;
  cudaGetLastError();  // or the next launch would seem to fail
  of(plugin, message).add("%s: %s", doing, cudaGetErrorString(error));
  return true;
}

}  // namespace

bool enqueue(const Instance& plugin, const View* inputs, const View* outputs,
             void const* const* input_pointers, void* const* output_pointers, void* workspace,
             cudaStream_t stream, Message& message) {
  const Operator& op = *plugin.op;
  Prepared prepared;
  if (!prepare(plugin, inputs, op.inputs.count, outputs, op.outputs.count, false, prepared,
               message))
    return false;
  Image& params = prepared.params;
  if (!input_pointers || !output_pointers)
    return of(plugin, message).refuse("the lists of pointers are null");
  for (int i = 0; i < op.inputs.count; ++i) {
    const void* pointer = input_pointers[i];
    if (!check_pointer(plugin, false, op.inputs[i], inputs[i], pointer, message)) return false;
    set_pointer(params, op.inputs[i], pointer);
  }
  for (int i = 0; i < op.outputs.count; ++i) {
    void* pointer = output_pointers[i];
    if (!check_pointer(plugin, true, op.outputs[i], outputs[i], pointer, message)) return false;
    set_pointer(params, op.outputs[i], pointer);
  }

  const Launch launch{workspace, prepared.workspace_bytes, stream, prepared.device};
  if (launch.workspace_bytes && !workspace)
    return of(plugin, message)
        .refuse("the workspace is null, expected %zu bytes", launch.workspace_bytes);
  for (int i = 0; i < op.outputs.count; ++i) {
    const Tensor& output = op.outputs[i];
    if (output.alias < 0 || output_pointers[i] == input_pointers[output.alias]) continue;
    if (!output.copied && !is_unused(plugin, output, params)) continue;
    const size_t bytes = elements_of(outputs[i]) * bytes_of(outputs[i].type);
    if (bytes && fails(plugin,
                       cudaMemcpyAsync(output_pointers[i], input_pointers[output.alias], bytes,
                                       cudaMemcpyDeviceToDevice, stream),
                       output.name, message))
      return false;
  }
  return !fails(plugin, op.launch(params.bytes, launch), "launch", message);
}

}  // namespace plugin
}  // namespace edgepool
