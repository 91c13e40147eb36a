// Reads ranges of a file into device memory: file -> pinned ring -> device, by several threads.
//
// A thread has a stream and a ring of small pinned buffers: while the device fetches what is in
// one, the thread reads the next. The file is read with pread, which for cached pages is one copy.
// Buffers are small, so that they are still in the processor's caches when the device fetches them,
// and a byte crosses the memory bus once instead of three times. That takes tens of thousands of
// copies for a large engine, so nothing here holds Python's lock.
//
// `llmctl_load_ahead` makes the context and the memory, too, so that it needs neither torch nor
// Python's lock, which importing torch holds for a second or more.
//
// The functions of the CUDA driver are passed by address: the library links to no driver. Without
// them the destination is host memory.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <vector>

#include "../cpu/exports.h"

namespace llmctl {
namespace {

// Bytes [begin, end) of the file go to `address`.
struct LoadPiece {
  int64_t begin, end;
  uint64_t address;
};

// Each returns 0, or the driver's status.
struct LoadDriver {
  int (*set_context)(void*);
  int (*host_allocate)(void**, size_t, unsigned);
  int (*host_free)(void*);
  int (*stream_create)(void**, unsigned);
  int (*stream_synchronize)(void*);
  int (*stream_destroy)(void*);
  int (*event_create)(void**, unsigned);
  int (*event_record)(void*, void*);
  int (*event_synchronize)(void*);
  int (*event_destroy)(void*);
  int (*copy_to_device)(uint64_t, const void*, size_t, void*);
};

// What a process needs that has not used the device yet. Each returns 0, or the driver's status.
struct StartDriver {
  int (*init)(unsigned);
  int (*device_get)(int*, int);
  int (*retain_context)(void**, int);
  int (*set_context)(void*);
  int (*allocate)(uint64_t*, size_t);
};

constexpr unsigned kNonBlocking = 1, kDisableTiming = 2;

enum Failure : int { kNone = 0, kShort = 1, kRead = 2, kDriver = 3 };

// What has come of it so far; the caller may look while it runs.
struct LoadReport {
  int64_t failure;      // a `Failure`
  int64_t code;         // errno, or the driver's status
  int64_t position;     // of the file, in bytes
  int64_t is_stopped;   // by the caller: nothing more is read
  uint64_t address;     // of memory that was allocated; 0 before
  uint64_t context;     // in which it was
  int64_t nanoseconds;  // that reading took
};

// A part of a piece that fits into a buffer.
struct Chunk {
  int64_t begin, end;
  uint64_t address;
};

class Loader {
 public:
  Loader(int file, std::vector<Chunk> chunks, int64_t chunk_bytes, int ring, void* context,
         const LoadDriver* driver, LoadReport* report)
      : file_(file), chunks_(std::move(chunks)), chunk_bytes_(chunk_bytes), ring_(ring),
        context_(context), driver_(driver), report_(report) {}

  void run(int num_threads) {
    std::vector<std::thread> threads;
    try {
      for (int i = 1; i < num_threads; ++i) threads.emplace_back([this] { work(); });
    } catch (const std::system_error&) {  // fewer will do
    }
    work();
    for (std::thread& thread : threads) thread.join();
  }

 private:
  // The next chunk; null when there is none, a thread has failed, or the caller wants no more.
  const Chunk* take() {
    if (has_failed_ || __atomic_load_n(&report_->is_stopped, __ATOMIC_RELAXED)) return nullptr;
    const size_t index = next_++;
    return index < chunks_.size() ? &chunks_[index] : nullptr;
  }

  void fail(Failure failure, int64_t code, int64_t position) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_failed_) report_->failure = failure, report_->code = code, report_->position = position;
    has_failed_ = true;
  }

  // Whether a call of the driver succeeded.
  bool check(int status) {
    if (status != 0) fail(kDriver, status, 0);
    return status == 0;
  }

  bool read(const Chunk& chunk, char* to) {
    for (int64_t at = chunk.begin; at < chunk.end;) {
      const ssize_t got = pread(file_, to + (at - chunk.begin), chunk.end - at, at);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        fail(got == 0 ? kShort : kRead, got == 0 ? 0 : errno, at);
        return false;
      }
      at += got;
    }
    return true;
  }

  void work() { driver_ ? work_on_device() : work_on_host(); }

  void work_on_host() {
    while (const Chunk* chunk = take()) {
      if (!read(*chunk, reinterpret_cast<char*>(chunk->address))) return;
    }
  }

  void work_on_device() {
    if (!check(driver_->set_context(context_))) return;
    void* stream = nullptr;
    if (!check(driver_->stream_create(&stream, kNonBlocking))) return;
    std::vector<void*> buffers, events;
    for (int i = 0; i < ring_ && !has_failed_; ++i) {
      void *buffer = nullptr, *event = nullptr;
      if (check(driver_->host_allocate(&buffer, chunk_bytes_, 0))) buffers.push_back(buffer);
      if (check(driver_->event_create(&event, kDisableTiming))) events.push_back(event);
    }
    for (size_t turn = 0; const Chunk* chunk = take(); turn = (turn + 1) % ring_) {
      char* buffer = static_cast<char*>(buffers[turn]);
      // An event that was never recorded counts as passed.
      if (!check(driver_->event_synchronize(events[turn])) || !read(*chunk, buffer)) break;
      const size_t size = chunk->end - chunk->begin;
      if (!check(driver_->copy_to_device(chunk->address, buffer, size, stream))) break;
      if (!check(driver_->event_record(events[turn], stream))) break;
    }
    check(driver_->stream_synchronize(stream));  // buffers are read until then
    for (void* buffer : buffers) driver_->host_free(buffer);
    for (void* event : events) driver_->event_destroy(event);
    driver_->stream_destroy(stream);
  }

  const int file_;
  const std::vector<Chunk> chunks_;
  const int64_t chunk_bytes_;
  const int ring_;
  void* const context_;
  const LoadDriver* const driver_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> has_failed_{false};
  std::mutex mutex_;
  LoadReport* const report_;
};

// Pieces in parts that fit into a buffer, with what is to be added to their addresses.
std::vector<Chunk> cut(const LoadPiece* pieces, int64_t count, int64_t chunk_bytes, uint64_t base) {
  std::vector<Chunk> chunks;
  for (int64_t i = 0; i < count; ++i) {
    const LoadPiece& piece = pieces[i];
    for (int64_t begin = piece.begin; begin < piece.end; begin += chunk_bytes) {
      chunks.push_back({begin, std::min(piece.end, begin + chunk_bytes),
                        base + piece.address + static_cast<uint64_t>(begin - piece.begin)});
    }
  }
  return chunks;
}

}  // namespace

// Reads `count` pieces by `num_threads` threads, each with `ring` buffers of chunk_bytes; returns
// when everything has arrived or the caller has set `is_stopped`, or with what failed first in the
// report. The calling thread is one of them. driver: null for host memory.
LLMCTL_EXPORT void llmctl_load(int file, const LoadPiece* pieces, int64_t count,
                               int64_t chunk_bytes, int ring, int num_threads, void* context,
                               const LoadDriver* driver, LoadReport* report) {
  if (!count) return;
  const auto began = std::chrono::steady_clock::now();
  Loader(file, cut(pieces, count, chunk_bytes, report->address), chunk_bytes, ring, context, driver,
         report)
      .run(num_threads);
  report->nanoseconds = std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count();
}

// Makes the device's context current, allocates num_bytes and loads as above, with addresses that
// count from the memory's begin.
LLMCTL_EXPORT void llmctl_load_ahead(int file, const LoadPiece* pieces, int64_t count,
                                     int64_t chunk_bytes, int ring, int num_threads, int device,
                                     int64_t num_bytes, const StartDriver* start,
                                     const LoadDriver* driver, LoadReport* report) {
  void* context = nullptr;
  uint64_t address = 0;
  int handle = 0, status = start->init(0);
  if (!status) status = start->device_get(&handle, device);
  if (!status) status = start->retain_context(&context, handle);
  if (!status) status = start->set_context(context);
  if (!status && num_bytes) status = start->allocate(&address, num_bytes);
  if (status) {
    report->failure = kDriver, report->code = status;
    return;
  }
  report->context = reinterpret_cast<uint64_t>(context);
  __atomic_store_n(&report->address, address, __ATOMIC_RELEASE);
  llmctl_load(file, pieces, count, chunk_bytes, ring, num_threads, context, driver, report);
}

}  // namespace llmctl
