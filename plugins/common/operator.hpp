// What the TensorRT plugins are told about an operator. `plugins/<op>/plugin.cpp` describes it
// once, and common/ makes the plugin, for each interface of TensorRT, out of the description.
//
//   struct Kernel {
//     using Params = ...;                                  // plain data, what the kernel takes
//     static constexpr const char* kName = "IndexPool";    // of the ONNX node
//     static void describe(Description&, Params&);         // which tensor goes to which member
//     static void set_device(Params&, const Device&);      // before the three that follow
//     static const char* problem(const Params&);           // null, or why it cannot run
//     static size_t workspace_bytes(const Params&);        // enough for smaller sizes, too
//     static cudaError_t launch(Params&, const Launch&);
//   };
//   const Registered<Kernel> registered;
//
// Nothing here needs TensorRT.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace edgepool {
namespace plugin {

constexpr int kMaxTensors = 16, kMaxSizes = 16, kMaxAttributes = 8, kMaxChoices = 4, kMaxRank = 8;
constexpr int kMaxOperators = 32;
constexpr int32_t kMost = 0x7fffffff;

// Elements of a tensor.
enum class Element : int32_t { f32, f16, s8, i32, other };
// What they may be: T is f32 or f16, one for all tensors of a node; P is T, or s8.
enum class Kind { T, P, f32, i32 };

struct Device {
  int sm, multiprocessors;  // sm: 87 for compute capability 8.7
};

struct Launch {
  void* workspace;
  size_t workspace_bytes;
  cudaStream_t stream;
  Device device;
};

// The extent of an axis: a number, a size by its index in Operator::sizes, or an attribute.
struct Axis {
  enum Of { number, size, attribute } of;
  int32_t value;
  constexpr Axis(int32_t n = 0) : of(number), value(n) {}
  constexpr Axis(Of what, int32_t index) : of(what), value(index) {}
};

struct Size {
  const char* name;
  size_t offset;  // of an int32_t in Params
};

struct Attribute {
  enum Type { integer, number, choice } type;
  const char* name;
  size_t offset;                     // of 4 bytes in Params; a choice is stored as its index
  double low, high;                  // both allowed
  const char* choices[kMaxChoices];  // up to the first null
};

struct Tensor {
  const char* name;
  Kind kind;
  Axis shape[kMaxRank];
  int rank;
  int64_t pointer;  // offset in Params of where the kernel finds it; -1: it does not look for it
  int without;      // index of the attribute that, with this value, leaves the tensor unused ...
  int32_t with_value;
  bool scales;  // ... or a P that is not s8 does. Its shape is then [1].
  int alias;    // output: the input that it is the new state of; -1: none
  bool copied;  // output: the kernel updates it in place, so the old state has to be there

  // The tensor is unused where the attribute has this value (a choice: by its index).
  Tensor& unused_if(Axis attribute, int32_t value) {
    without = attribute.value, with_value = value;
    return *this;
  }
  Tensor& for_int8() { return scales = true, *this; }
};

// Up to N values in place, so that describing an operator allocates nothing.
template <class X, int N>
struct List {
  X items[N];
  int count;
  X& add(const X& x) { return items[count++] = x; }
  const X& operator[](int i) const { return items[i]; }
  const X* begin() const { return items; }
  const X* end() const { return items + count; }
};

constexpr size_t kParamsBytes = 512;
// A Params, as bytes.
struct Image {
  alignas(16) unsigned char bytes[kParamsBytes];
};

struct Operator {
  const char* name;
  List<Size, kMaxSizes> sizes;
  List<Attribute, kMaxAttributes> attributes;
  List<Tensor, kMaxTensors> inputs, outputs;
  size_t activation, storage;  // offsets in Params of what T and P are
  void (*set_device)(void* params, const Device&);
  const char* (*problem)(const void* params);
  size_t (*workspace_bytes)(const void* params);
  cudaError_t (*launch)(void* params, const Launch&);
};

// Fills an Operator. Members of the Params that it was given say where values go.
class Description {
 public:
  Description(Operator& described, const void* params)
      : op_(described), params_(static_cast<const char*>(params)) {}

  // Enumerations of the kernel that number f32, f16 and s8 as Element does.
  template <class E>
  void types(const E& activation, const E& storage) {
    static_assert(int(E::f32) == int(Element::f32) && int(E::f16) == int(Element::f16) &&
                      int(E::s8) == int(Element::s8) && sizeof(E) == 4,
                  "the kernel numbers its types differently");
    op_.activation = offset(activation), op_.storage = offset(storage);
  }
  Axis size(const char* name, const int32_t& member) {
    op_.sizes.add({name, offset(member)});
    return {Axis::size, op_.sizes.count - 1};
  }

  Axis attribute(const char* name, const int32_t& member, int32_t low, int32_t high = kMost) {
    return add({Attribute::integer, name, offset(member), double(low), double(high), {}});
  }
  Axis attribute(const char* name, const float& member, float low, float high) {
    return add({Attribute::number, name, offset(member), double(low), double(high), {}});
  }
  // An enumeration whose values are numbered in the order of `choices`.
  template <class E>
  Axis attribute(const char* name, const E& member, std::initializer_list<const char*> choices) {
    static_assert(std::is_enum<E>::value && sizeof(E) == 4, "a choice is an enum of 4 bytes");
    Attribute a{Attribute::choice, name, offset(member), 0, double(choices.size() - 1), {}};
    int i = 0;
    for (const char* choice : choices) a.choices[i++] = choice;
    return add(a);
  }

  template <class Pointer>
  Tensor& input(const char* name, Kind kind, std::initializer_list<Axis> shape,
                const Pointer& member) {
    return op_.inputs.add(tensor(name, kind, shape, offset_of_pointer(member)));
  }
  // State that the kernel finds at the output that is updated from it.
  Tensor& input(const char* name, Kind kind, std::initializer_list<Axis> shape) {
    return op_.inputs.add(tensor(name, kind, shape, -1));
  }
  template <class Pointer>
  Tensor& output(const char* name, Kind kind, std::initializer_list<Axis> shape,
                 const Pointer& member) {
    return op_.outputs.add(tensor(name, kind, shape, offset_of_pointer(member)));
  }
  // The new state of an input, named as it is with `_out`. kernel_copies: the kernel writes all of
  // it; otherwise it updates in place what is copied there before, unless it is there already.
  template <class Pointer>
  void state(const char* name, const char* input, const Pointer& member,
             bool kernel_copies = false);

 private:
  template <class M>
  size_t offset(const M& member) const {
    return static_cast<size_t>(reinterpret_cast<const char*>(&member) - params_);
  }
  template <class Pointer>
  int64_t offset_of_pointer(const Pointer& member) const {
    static_assert(std::is_pointer<Pointer>::value, "a tensor's member is a pointer");
    return static_cast<int64_t>(offset(member));
  }
  Axis add(const Attribute& attribute) {
    op_.attributes.add(attribute);
    return {Axis::attribute, op_.attributes.count - 1};
  }
  static Tensor tensor(const char* name, Kind kind, std::initializer_list<Axis> shape,
                       int64_t pointer) {
    Tensor t{name, kind, {}, static_cast<int>(shape.size()), pointer, -1, 0, false, -1, false};
    int i = 0;
    for (const Axis& axis : shape) t.shape[i++] = axis;
    return t;
  }

  Operator& op_;
  const char* params_;
};

template <class Pointer>
void Description::state(const char* name, const char* input, const Pointer& member,
                        bool kernel_copies) {
  for (int i = 0; i < op_.inputs.count; ++i) {
    const Tensor& from = op_.inputs[i];
    bool same = true;
    for (int c = 0; same && (from.name[c] || input[c]); ++c) same = from.name[c] == input[c];
    if (!same) continue;
    Tensor& to = op_.outputs.add(from);
    to.name = name, to.pointer = offset_of_pointer(member);
    to.alias = i, to.copied = !kernel_copies;
  }
}

// Every operator of this library, in the order in which their objects were linked.
const Operator* const* operators(int& count);
// Calls f with each of them, also with those that are added later.
void on_operator(void (*f)(const Operator&));
void add(const Operator&);

template <class Kernel>
struct Registered {
  using Params = typename Kernel::Params;
  static_assert(std::is_trivially_copyable<Params>::value && sizeof(Params) <= kParamsBytes,
                "Params are plain data of at most kParamsBytes");

  Operator op{};

  Registered() {
    Params params{};
    op.name = Kernel::kName;
    Description description(op, &params);
    Kernel::describe(description, params);
    op.set_device = [](void* p, const Device& d) {
      Kernel::set_device(*static_cast<Params*>(p), d);
    };
    op.problem = [](const void* p) { return Kernel::problem(*static_cast<const Params*>(p)); };
    op.workspace_bytes = [](const void* p) {
      return Kernel::workspace_bytes(*static_cast<const Params*>(p));
    };
    op.launch = [](void* p, const Launch& l) {
      return Kernel::launch(*static_cast<Params*>(p), l);
    };
    add(op);
  }
};

}  // namespace plugin
}  // namespace edgepool
