// Threads that wait for work: spin for a moment, then sleep.
//
// One op is split into items. Each thread takes those of a range of its own in order, so that it reads
// on where it stopped and what it prefetched is its own next item, and then those that are left of
// other ranges. So a slow or descheduled thread costs little: whoever is awake does the work, and only
// threads that took part are waited for. Which thread computes an item never changes a bit of the
// result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace llmctl {

// What a worker does while whoever asked for it does something else. Nothing refers to one that is done.
struct Aside {
  explicit Aside(void (*body)(Aside&)) : body(body) {}
  void (*body)(Aside&);  // called with the pool's step_mutex held; does not throw
  std::atomic<bool> is_done{false};
};

constexpr size_t kScratchBytes = 1 << 20;  // of each thread; every kernel's blocks fit this

class Pool {
 public:
  using Body = void (*)(void* context, int64_t item, void* scratch);

  // The process-wide pool; started lazily, and anew in a forked child.
  static Pool& instance();

  // The number of threads that work, the caller included. Joins the threads there are.
  void resize(int num_threads);
  int num_threads() const { return num_threads_; }

  // Call body(context, item, scratch) for every item in [0, items) and return when all are done.
  void run(int64_t items, Body body, void* context);

  // The same for a callable f(item, scratch). With `serial` the caller does everything itself.
  template <class F>
  void each(int64_t items, bool serial, F& f) {
    if (serial || items <= 1 || num_threads_ == 1) {
      for (int64_t i = 0; i < items; ++i) f(i, scratch(own_index()));
      return;
    }
    run(items, [](void* context, int64_t item, void* own) { (*static_cast<F*>(context))(item, own); },
        &f);
  }

  // Hand `aside` to a worker that has nothing to do; false: there is none, or another one waits.
  // Where it is true, `end` must follow.
  bool begin(Aside& aside);

  // Return when it is done: help with it, or do all of it if no worker has begun. The caller does not
  // hold step_mutex.
  void end(Aside& aside);

  void* scratch(int thread);
  std::mutex& step_mutex() { return step_mutex_; }  // held while a step runs

 private:
  explicit Pool(int num_threads) : num_threads_(num_threads) {}
  void start();
  void stop();
  void work(int thread);
  bool help(uint64_t& last, const Aside* of);
  bool run_aside();
  void take_items();
  void sleep(uint64_t seen);
  void wake_sleepers();
  static int& own_index();  // of the thread: 0 for all but workers

  std::atomic<int> num_threads_;
  bool started_ = false;
  std::vector<std::thread> threads_;
  std::vector<void*> scratch_;
  std::mutex step_mutex_;

  // generation (48 bits) | open (1 bit) | threads inside (15 bits)
  alignas(64) std::atomic<uint64_t> state_{0};
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  std::vector<Range> ranges_;  // items of each thread
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<Aside*> aside_{nullptr};    // waits for a worker
  std::atomic<Aside*> running_{nullptr};  // a worker is at it
  std::atomic<bool> stopping_{false};
  int64_t items_ = 0;
  Body body_ = nullptr;
  void* context_ = nullptr;
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
};

}  // namespace llmctl
