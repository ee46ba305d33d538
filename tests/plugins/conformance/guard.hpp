// Calls into a plugin that survive its crash: a test reports it instead of ending.
#pragma once
#include <csetjmp>
#include <csignal>
#include <cstring>
#include <exception>
#include <string>

namespace conformance {

// What the last crash was; empty if there was none.
inline std::string crash;

namespace detail {

inline sigjmp_buf* way_out = nullptr;

inline void on_signal(int signal) {
  crash = strsignal(signal);
  siglongjmp(*way_out, 1);
}
// An exception that left a noexcept function.
[[noreturn]] inline void on_terminate() {
  crash = "an exception crossed the boundary";
  siglongjmp(*way_out, 1);
}

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

class Handlers {
 public:
  Handlers() : terminate_(std::set_terminate(on_terminate)) {
    struct sigaction action{};
    action.sa_handler = on_signal;
    action.sa_flags = SA_NODEFER;
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  ~Handlers() {
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &before_[i], nullptr);
    std::set_terminate(terminate_);
  }

 private:
  static constexpr int kCount = sizeof kSignals / sizeof *kSignals;
  std::terminate_handler terminate_;
  struct sigaction before_[kCount];
};

// Whether f(closure) came to its end.
inline __attribute__((noinline)) bool completes(void (*f)(void*), void* closure) {
  const Handlers handlers;
  sigjmp_buf here;
  sigjmp_buf* const volatile outer = way_out;
  way_out = &here;
  const bool entered = sigsetjmp(here, 1) == 0;
  if (entered) f(closure);
  way_out = outer;
  return entered;
}

}  // namespace detail

// The result of `call`, or `otherwise`, and `crash` is set.
template <class R, class F>
R guarded(R otherwise, F&& call) {
  struct {
    F& call;
    R result;
  } closure{call, otherwise};
  const auto run = [](void* c) {
    auto* all = static_cast<decltype(closure)*>(c);
    all->result = all->call();
  };
  return detail::completes(run, &closure) ? closure.result : otherwise;
}

}  // namespace conformance
