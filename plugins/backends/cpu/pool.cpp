#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <cstdlib>
#include <new>

namespace llmctl {
namespace {

constexpr uint64_t kInside = (1u << 15) - 1;
constexpr uint64_t kOpen = 1u << 15;
constexpr uint64_t kGeneration = 1u << 16;
constexpr auto kSpin = std::chrono::microseconds(250);

std::atomic<Pool*> g_instance{nullptr};
std::atomic<int> g_num_threads{1};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A forked child has no worker threads: forget the parent's pool, and start one when needed.
void forget_pool() { g_instance.store(nullptr); }

}  // namespace

Pool& Pool::instance() {
  Pool* pool = g_instance.load();
  if (pool == nullptr) {
    static std::once_flag registered;
    std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, forget_pool); });
    Pool* fresh = new Pool(g_num_threads.load());
    if (g_instance.compare_exchange_strong(pool, fresh)) {
      pool = fresh;  // lives until the process ends: workers may still spin at exit
    } else {
      delete fresh;
    }
  }
  return *pool;
}

void Pool::resize(int num_threads) {
  std::lock_guard<std::mutex> lock(step_mutex_);
  stop();
  num_threads_ = num_threads;
  g_num_threads.store(num_threads);
}

void* Pool::scratch(int thread) {
  if (scratch_.size() <= static_cast<size_t>(thread)) scratch_.resize(thread + 1, nullptr);
  if (scratch_[thread] == nullptr) {
    scratch_[thread] = std::aligned_alloc(4096, kScratchBytes);
    if (scratch_[thread] == nullptr) throw std::bad_alloc();
  }
  return scratch_[thread];
}

void Pool::start() {
  for (int thread = 0; thread < num_threads_; ++thread) scratch(thread);
  for (int thread = 1; thread < num_threads_; ++thread) {
    threads_.emplace_back([this, thread] { work(thread); });
  }
  started_ = true;
}

void Pool::stop() {
  stopping_.store(true);
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    wake_.notify_all();
  }
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  stopping_.store(false);
  started_ = false;
}

void Pool::take_items(int thread) {
  void* own = scratch_[thread];
  for (int64_t item = next_.fetch_add(1, std::memory_order_relaxed); item < items_;
       item = next_.fetch_add(1, std::memory_order_relaxed)) {
    body_(context_, item, own);
  }
}

void Pool::run(int64_t items, Body body, void* context) {
  if (!started_) start();
  items_ = items;
  body_ = body;
  context_ = context;
  next_.store(0, std::memory_order_relaxed);
  const uint64_t generation = (state_.load(std::memory_order_relaxed) & ~(kGeneration - 1));
  state_.store(generation + kGeneration + kOpen);
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    wake_.notify_all();
  }
  take_items(0);
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; (state_.load(std::memory_order_acquire) & kInside) != 0; ++spins) {
    if (spins < 4096) {
      pause();
    } else {
      sched_yield();  // a worker lost its core in the middle of an item
    }
  }
}

void Pool::work(int thread) {
  uint64_t last = 0;
  auto idle_since = std::chrono::steady_clock::now();
  for (int spins = 0; !stopping_.load(std::memory_order_relaxed); ++spins) {
    uint64_t state = state_.load(std::memory_order_acquire);
    const uint64_t generation = state & ~(kGeneration - 1);
    if (generation != last && (state & kOpen) != 0) {
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      last = generation;
      take_items(thread);
      state_.fetch_sub(1, std::memory_order_acq_rel);
      idle_since = std::chrono::steady_clock::now();
    } else if ((spins & 63) == 63 && std::chrono::steady_clock::now() - idle_since > kSpin) {
      sleep(last);
      idle_since = std::chrono::steady_clock::now();
    } else {
      pause();
    }
  }
}

void Pool::sleep(uint64_t seen) {
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] {
    const uint64_t state = state_.load();
    const bool has_work = (state & ~(kGeneration - 1)) != seen && (state & kOpen) != 0;
    return has_work || stopping_.load();
  });
  sleepers_.fetch_sub(1);
}

}  // namespace llmctl
