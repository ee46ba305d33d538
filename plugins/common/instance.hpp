// An operator with its attributes, and what a plugin does with it, in terms of no TensorRT version:
// every check, the kernel's Params, the workspace and the launch. Nothing here throws or allocates.
#pragma once
#include "operator.hpp"

namespace edgepool {
namespace plugin {

// One line for the log, shortened where it is too long.
class Message {
 public:
  Message() { text_[0] = 0; }
  Message& add(const char* format, ...) __attribute__((format(printf, 2, 3)));
  // Adds and returns false, so that a check can end with it.
  bool refuse(const char* format, ...) __attribute__((format(printf, 2, 3)));
  const char* text() const { return text_; }

 private:
  char text_[600];
  int length_ = 0;
};

struct Instance {
  const Operator* op = nullptr;
  char layer[96] = "";  // of the network, for messages
  Image attributes{};   // Params in which the attributes have their values

  void name_layer(const char* name);
};

// A tensor as TensorRT describes it.
struct View {
  int32_t rank;
  int64_t dims[kMaxRank];
  bool open[kMaxRank];  // the extent varies, and dims holds the largest
  Element type;
  bool linear;

  void open_all() {
    for (bool& each : open) each = true;
  }
};

// Where a 4-byte value of an attribute is.
int32_t attribute_bits(const Instance&, const Attribute&);
void set_attribute_bits(Instance&, const Attribute&, int32_t bits);
double attribute_value(const Instance&, const Attribute&);
// Refuses what is out of range or NaN.
bool check_attribute(const Instance&, const Attribute&, Message&);
// "ratio=4;weighting=gate;...", all of them, numbers exactly.
void write_attributes(const Instance&, char* text, size_t size);

// Whether the tensor at `at` among inputs and then outputs may have this type and format, given
// those before it.
bool supports(const Operator&, int32_t at, const View* tensors, int32_t inputs, int32_t outputs);
// The output's type; refuses inputs whose types do not fit.
bool output_type(const Instance&, int32_t output, const Element* inputs, int32_t count, Element&,
                 Message&);

// What a launch needs but for pointers. workspace_bytes: enough for these sizes and for smaller
// ones.
struct Prepared {
  Image params;
  Device device;
  size_t workspace_bytes;
};
// Fills it from attributes, types, shapes and the current device; refuses what the operator or the
// kernel cannot be given. bounds: dims are upper limits, which two tensors need not share exactly.
bool prepare(const Instance&, const View* inputs, int32_t n_inputs, const View* outputs,
             int32_t n_outputs, bool bounds, Prepared&, Message&);

// Copies state that is not in place, then puts the kernels on the stream.
bool enqueue(const Instance&, const View* inputs, const View* outputs,
             void const* const* input_pointers, void* const* output_pointers, void* workspace,
             cudaStream_t stream, Message&);

}  // namespace plugin
}  // namespace edgepool
