// What TensorRT gives a plugin to describe output shapes with: expressions over input sizes, here
// trees that are evaluated for given sizes.
#pragma once
#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

namespace conformance {

constexpr int64_t kUnknown = std::numeric_limits<int64_t>::min();

class Expression final : public nvinfer1::IDimensionExpr, public nvinfer1::apiv::VDimensionExpr {
 public:
  enum class Kind { constant, size, operation };

  Expression(Kind kind, int64_t value) : kind_(kind), value_(value) { mImpl = this; }
  Expression(nvinfer1::DimensionOperation operation, const Expression& first,
             const Expression& second)
      : kind_(Kind::operation), operation_(operation), first_(&first), second_(&second) {
    mImpl = this;
  }

  // kUnknown for what has no value: a division by zero.
  int64_t value() const {
    if (kind_ != Kind::operation) return value_;
    const int64_t x = first_->value(), y = second_->value();
    if (x == kUnknown || y == kUnknown) return kUnknown;
    using nvinfer1::DimensionOperation;
    switch (operation_) {
      case DimensionOperation::kSUM: return x + y;
      case DimensionOperation::kPROD: return x * y;
      case DimensionOperation::kMAX: return std::max(x, y);
      case DimensionOperation::kMIN: return std::min(x, y);
      case DimensionOperation::kSUB: return x - y;
      case DimensionOperation::kEQUAL: return x == y;
      case DimensionOperation::kLESS: return x < y;
      case DimensionOperation::kFLOOR_DIV: return y ? quotient(x, y) : kUnknown;
      case DimensionOperation::kCEIL_DIV: return y ? -quotient(-x, y) : kUnknown;
    }
    return kUnknown;
  }

  bool isConstant() const override {
    return kind_ == Kind::constant ||
           (kind_ == Kind::operation && first_->isConstant() && second_->isConstant());
  }
  int64_t getConstantValue() const override { return isConstant() ? value() : kUnknown; }
  bool isSizeTensor() const override { return false; }

 private:
  static int64_t quotient(int64_t x, int64_t y) { return x / y - (x % y && (x < 0) != (y < 0)); }

  const Kind kind_;
  const int64_t value_ = 0;
  const nvinfer1::DimensionOperation operation_{};
  const Expression *const first_ = nullptr, *const second_ = nullptr;
};

class ExpressionBuilder final : public nvinfer1::IExprBuilder, public nvinfer1::apiv::VExprBuilder {
 public:
  ExpressionBuilder() { mImpl = this; }

  // The sizes of a tensor: those that `dynamic` has a bit for are known at run time only.
  nvinfer1::DimsExprs sizes(const nvinfer1::Dims& shape, uint32_t dynamic) {
    nvinfer1::DimsExprs result{};
    result.nbDims = shape.nbDims;
    for (int i = 0; i < shape.nbDims; ++i) {
      const bool known = !(dynamic >> i & 1);
      result.d[i] = &made_.emplace_back(known ? Expression::Kind::constant : Expression::Kind::size,
                                        shape.d[i]);
    }
    return result;
  }
  // The sizes that expressions stand for; a rank of -1 if one stands for nothing.
  nvinfer1::Dims evaluate(const nvinfer1::DimsExprs& sizes) const {
    nvinfer1::Dims result{};
    result.nbDims = sizes.nbDims;
    for (int i = 0; i < sizes.nbDims && i < nvinfer1::Dims::MAX_DIMS; ++i) {
      const auto* expression = static_cast<const Expression*>(sizes.d[i]);
      result.d[i] = expression ? expression->value() : kUnknown;
      if (result.d[i] == kUnknown) result.nbDims = -1;
    }
    return result;
  }

  const nvinfer1::IDimensionExpr* constant(int64_t value) override {
    return &made_.emplace_back(Expression::Kind::constant, value);
  }
  const nvinfer1::IDimensionExpr* operation(nvinfer1::DimensionOperation operation,
                                            const nvinfer1::IDimensionExpr& first,
                                            const nvinfer1::IDimensionExpr& second) override {
    return &made_.emplace_back(operation, static_cast<const Expression&>(first),
                               static_cast<const Expression&>(second));
  }
  // For shapes that depend on values: no plugin here has one.
  const nvinfer1::IDimensionExpr* declareSizeTensor(int32_t, const nvinfer1::IDimensionExpr&,
                                                    const nvinfer1::IDimensionExpr&) override {
    return nullptr;
  }

 private:
  std::deque<Expression> made_;
};

}  // namespace conformance
