// Reads ranges of a file into device memory: file -> pinned ring -> device, by several threads.
//
// A thread has a stream and a ring of small pinned buffers: while the device fetches what is in
// one, the thread reads the next. The file is read with pread, which for cached pages is one copy.
// Buffers are small, so that they are still in the processor's caches when the device fetches them,
// and a byte crosses the memory bus once instead of three times. That takes tens of thousands of
// copies for a large engine, so nothing here holds Python's lock.
//
// The functions of the CUDA driver are passed by address: the library links to no driver. Without
// them the destination is host memory.
#include <algorithm>
#include <atomic>
#include <cerrno>
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

constexpr unsigned kNonBlocking = 1, kDisableTiming = 2;

enum Failure : int { kNone = 0, kShort = 1, kRead = 2, kDriver = 3 };

struct LoadReport {
  int64_t failure;  // a `Failure`
  int64_t code;     // errno, or the driver's status
  int64_t position;  // of the file, in bytes
};

// A part of a piece that fits into a buffer.
struct Chunk {
  int64_t begin, end;
  uint64_t address;
};

class Loader {
 public:
  Loader(int file, std::vector<Chunk> chunks, int64_t chunk_bytes, int ring, void* context,
         const LoadDriver* driver)
      : file_(file), chunks_(std::move(chunks)), chunk_bytes_(chunk_bytes), ring_(ring),
        context_(context), driver_(driver) {}

  LoadReport run(int num_threads) {
    std::vector<std::thread> threads;
    try {
      for (int i = 1; i < num_threads; ++i) threads.emplace_back([this] { work(); });
    } catch (const std::system_error&) {  // fewer will do
    }
    work();
    for (std::thread& thread : threads) thread.join();
    return report_;
  }

 private:
  // The next chunk; null when there is none, or a thread has failed.
  const Chunk* take() {
    if (has_failed_) return nullptr;
    const size_t index = next_++;
    return index < chunks_.size() ? &chunks_[index] : nullptr;
  }

  void fail(Failure failure, int64_t code, int64_t position) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_failed_) report_ = {failure, code, position};
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
  LoadReport report_{};
};

}  // namespace

// Reads `count` pieces by `num_threads` threads, each with `ring` buffers of chunk_bytes; returns
// when everything has arrived, or what failed first in the report. The calling thread is one of
// them. driver: null for host memory.
LLMCTL_EXPORT void llmctl_load(int file, const LoadPiece* pieces, int64_t count,
                               int64_t chunk_bytes, int ring, int num_threads, void* context,
                               const LoadDriver* driver, LoadReport* report) {
  std::vector<Chunk> chunks;
  for (int64_t i = 0; i < count; ++i) {
    const LoadPiece& piece = pieces[i];
    for (int64_t begin = piece.begin; begin < piece.end; begin += chunk_bytes) {
      chunks.push_back({begin, std::min(piece.end, begin + chunk_bytes),
                        piece.address + static_cast<uint64_t>(begin - piece.begin)});
    }
  }
  Loader loader(file, std::move(chunks), chunk_bytes, ring, context, driver);
  *report = loader.run(num_threads);
}

}  // namespace llmctl
