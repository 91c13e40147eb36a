// A whole beam search by a recurrent head in one call (plugins/backends/cpu/beam_search.py).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "program.h"

using namespace llmctl;

namespace {

constexpr int32_t kEnded = -1;  // a beam's next token where it has none
constexpr int32_t kRoot = -1;

struct Beam {
  std::vector<int32_t> tokens;
  std::vector<float> scores;  // of the path up to each token
  int32_t row;                // of the head's last step
  bool is_ended;
  float score() const { return scores.empty() ? 0.0f : scores.back(); }
};

// A continuation of a beam: the better score first, then the earlier beam, then the smaller token.
struct Offer {
  float score;
  int32_t beam, token;
  bool operator<(const Offer& other) const {
    if (score != other.score) return score > other.score;
    return beam != other.beam ? beam < other.beam : token < other.token;
  }
};

struct Search {
  const BeamSearch& asked;
  Pool& pool;
  std::vector<std::vector<Beam>> beams;  // of each request, the best first
  std::vector<int32_t> tokens, rows, offered, zeros;
  std::vector<float> log_probs;

  int run_on(void* program, const std::vector<int32_t>& ids, const std::vector<int32_t>& from) {
    const int32_t count = static_cast<int32_t>(ids.size());
    const int32_t bounds[2] = {0, count}, one = 1, none = 0;
    Step packed{};
    packed.num_tokens = packed.num_rows = count;
    packed.num_requests = packed.max_blocks = 1;
    packed.token_ids = ids.data();
    packed.logit_rows = from.data();
    zeros.resize(ids.size());
    packed.position_ids = packed.slot_mapping = zeros.data();
    packed.cu_q = bounds;
    packed.kv_len = &one;
    packed.block_tables = &none;  // and no cache: an op that asks for one is refused
    return run_program(*static_cast<const Program*>(program), packed, pool);
  }

  int step(void* program, const float* logits) {
    const int32_t count = static_cast<int32_t>(tokens.size());
    if (int bad = run_on(program, tokens, rows)) return bad;
    offered.resize(tokens.size() * asked.num_beams);
    log_probs.resize(offered.size());
    kernels().top_log_probs(logits, count, asked.vocab_size, asked.num_beams, offered.data(),
                            log_probs.data(), pool);
    return kDone;
  }

  // The best continuations of a request's beams. A beam of which none is kept ends.
  void choose(std::vector<Beam>& own) {
    std::vector<Offer> offers;
    for (int32_t b = 0; b < static_cast<int32_t>(own.size()); ++b) {
      const size_t before = offers.size();
      for (int32_t i = 0; i < asked.num_beams && !own[b].is_ended; ++i) {
        const size_t at = static_cast<size_t>(own[b].row) * asked.num_beams + i;
        const float total = own[b].score() + log_probs[at];
        const float score = total == total ? total : -std::numeric_limits<float>::infinity();
        if (score >= asked.least_kept) offers.push_back({score, b, offered[at]});
      }
      if (offers.size() == before) offers.push_back({own[b].score(), b, kEnded});
    }
    const size_t count = std::min<size_t>(offers.size(), asked.num_beams);
    std::partial_sort(offers.begin(), offers.begin() + count, offers.end());
    std::vector<Beam> found;
    found.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      found.push_back(own[offers[i].beam]);
      Beam& beam = found.back();
      if (offers[i].token == kEnded) {
        beam.is_ended = true;
        continue;
      }
      beam.tokens.push_back(offers[i].token);
      beam.scores.push_back(offers[i].score);
    }
    own.swap(found);
  }

  // The rows of the next step: beams that go on.
  void take_rows(int32_t length) {
    tokens.clear();
    rows.clear();
    for (int32_t r = 0; r < asked.num_requests; ++r) {
      for (Beam& beam : beams[r]) {
        if (asked.lengths[r] <= length || beam.score() < asked.least_continued) beam.is_ended = true;
        if (beam.is_ended) continue;
        tokens.push_back(beam.tokens.back());
        rows.push_back(beam.row);
        beam.row = static_cast<int32_t>(tokens.size()) - 1;
      }
    }
  }

  int run(int32_t* num_steps) {
    const int32_t count = asked.num_requests;
    beams.resize(count);
    for (int32_t r = 0; r < count; ++r) beams[r].push_back({{}, {}, r, false});
    tokens.assign(asked.roots, asked.roots + count);
    rows.assign(asked.rows, asked.rows + count);
    for (int32_t length = 0; !tokens.empty(); ++length) {
      if (length > 0) {
        if (int bad = hand_on(length == 1)) return bad;
      }
      const bool is_first = length == 0;
      if (int bad = step(is_first ? asked.first : asked.next,
                         is_first ? asked.first_logits : asked.next_logits)) {
        return bad;
      }
      previous = tokens.size();
      for (int32_t r = 0; r < count; ++r) {
        const bool goes_on = std::any_of(beams[r].begin(), beams[r].end(),
                                         [](const Beam& beam) { return !beam.is_ended; });
        if (goes_on) choose(beams[r]);
      }
      *num_steps = length + 1;
      take_rows(length + 1);
    }
    return kDone;
  }

  // What the step before left, to where the next one reads it.
  int hand_on(bool was_first) {
    if (void* rest = was_first ? asked.first_rest : asked.next_rest) {
      const std::vector<int32_t> unread(previous);
      if (int bad = run_on(rest, unread, unread)) return bad;
    }
    for (const HandedRows& part : asked.handed) {
      std::memcpy(part.to, was_first ? part.from_first : part.from_next, previous * part.row_bytes);
    }
    return kDone;
  }

  // A request's beams as a tree, beam after beam, until there is no room.
  int32_t merge(int32_t request) const {
    const int64_t at = static_cast<int64_t>(request) * asked.width;
    int32_t *found = asked.tokens + at, *parents = asked.parents + at, count = 0;
    for (const Beam& beam : beams[request]) {
      int32_t last = kRoot;
      for (size_t i = 0; i < beam.tokens.size(); ++i) {
        int32_t draft = last + 1;  // children come behind their parents
        while (draft < count && (parents[draft] != last || found[draft] != beam.tokens[i])) ++draft;
        if (draft == count) {
          if (count == asked.rooms[request]) break;
          found[count] = beam.tokens[i];
          parents[count] = last;
          asked.scores[at + count++] = beam.scores[i];
        }
        last = draft;
      }
    }
    return count;
  }

  size_t previous = 0;  // rows of the head's last step
};

int check(const BeamSearch& asked) {
  if (asked.num_beams < 1 || asked.num_beams > asked.vocab_size) {
    return fail_for_step("%lld beams; there must be at least 1 and at most %lld", asked.num_beams,
                         asked.vocab_size);
  }
  const int64_t most = static_cast<int64_t>(asked.num_requests) * asked.num_beams;
  if (asked.num_requests < 0 || asked.num_requests > asked.first_rows || most > asked.next_rows) {
    return fail_for_step("%lld requests with beams; the head was built for %lld rows",
                         asked.num_requests, asked.next_rows);
  }
  for (int32_t r = 0; r < asked.num_requests; ++r) {
    if (asked.lengths[r] < 1 || asked.rooms[r] < 0 || asked.rooms[r] > asked.width) {
      return fail_for_step("room for %lld drafts is asked for; the arrays have %lld",
                           asked.rooms[r], asked.width);
    }
  }
  return kDone;
}

// A whole search; the caller holds the pool's step_mutex.
int search_beams(BeamSearch& asked, Pool& pool) {
  if (int bad = check(asked)) return bad;
  asked.num_steps = 0;
  try {
    Search search{asked, pool, {}, {}, {}, {}, {}, {}};
    if (int bad = search.run(&asked.num_steps)) return bad;
    for (int32_t r = 0; r < asked.num_requests; ++r) asked.counts[r] = search.merge(r);
  } catch (const std::bad_alloc&) {
    return fail_for_memory("beams of %lld requests", asked.num_requests);
  }
  return kDone;
}

// A search that a worker may be at.
struct Begun : Aside {
  Begun(BeamSearch& asked, Pool& pool) : Aside(run), asked(asked), pool(pool) {}
  static void run(Aside& self) {
    auto& own = static_cast<Begun&>(self);
    own.status = search_beams(own.asked, own.pool);
  }
  BeamSearch& asked;
  Pool& pool;
  int status = kDone;
};

}  // namespace

LLMCTL_EXPORT int32_t llmctl_search_beams(BeamSearch* asked) {
  Pool& pool = Pool::instance();
  std::lock_guard<std::mutex> lock(pool.step_mutex());
  return search_beams(*asked, pool);
}

// Hand a search to another thread; null: there is none that has time. Until `llmctl_search_end`
// nobody may touch what the search reads and writes, and no step of the head may run.
LLMCTL_EXPORT void* llmctl_search_begin(BeamSearch* asked) {
  Pool& pool = Pool::instance();
  auto* begun = new (std::nothrow) Begun(*asked, pool);
  if (begun != nullptr && pool.begin(*begun)) return begun;
  delete begun;
  return nullptr;
}

// The end of that search; what it returns is of `llmctl_search_beams`.
LLMCTL_EXPORT int32_t llmctl_search_end(void* handle) {
  const std::unique_ptr<Begun> begun(static_cast<Begun*>(handle));
  const bool is_other = &begun->pool != &Pool::instance();  // of a process that forked this one
  if (!is_other) begun->pool.end(*begun);
  // One that failed is done again, for its message belongs to the thread that it failed in.
  return is_other || begun->status != kDone ? llmctl_search_beams(&begun->asked) : kDone;
}

LLMCTL_EXPORT int32_t llmctl_top_log_probs(const float* logits, int64_t rows, int64_t vocab,
                                           int64_t count, int32_t* tokens, float* log_probs) {
  if (count < 1 || count > vocab) return fail_for_step("the %lld likeliest of %lld", count, vocab);
  Pool& pool = Pool::instance();
  std::lock_guard<std::mutex> lock(pool.step_mutex());
  try {
    kernels().top_log_probs(logits, rows, vocab, count, tokens, log_probs, pool);
  } catch (const std::bad_alloc&) {
    return fail_for_memory("scratch for %lld rows", rows);
  }
  return kDone;
}
