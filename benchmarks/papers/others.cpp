// Other programs' n-grams behind one interface: a library for each of them (`make other-ngrams`; others.py loads them).
//
// learn: the corpus, documents with the token `end` between them. begin: another text, of which the prompt is known.
// draft: the text, which is longer now; writes the paths that may follow, -1 after each, and returns how many numbers.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

typedef std::vector<int32_t> Tokens;
static Tokens text;

static int written(const std::vector<Tokens> & paths, int32_t * found) {
    int32_t * end = found;
    for (const Tokens & path : paths) {
        end = std::copy(path.begin(), path.end(), end);
        *end++ = -1;
    }
    return end - found;
}

static void heard(const Tokens & document);  // of the corpus
static void told_all();
extern "C" void learn(const int32_t * ids, int count, int32_t end) {
    for (const int32_t * last = ids + count; ids < last; ++ids) {
        const int32_t * next = std::find(ids, last, end);
        if (next > ids) heard({ids, next});
        ids = next;
    }
    told_all();
}

#if defined(LLAMA)  // as llama-lookup does: 2-grams of the corpus, 1- to 4-grams of the text, drafts of 16 tokens

#include "log.h"
#include "ngram-cache.cpp"

int common_log_get_verbosity_thold() { return -1; }
struct common_log * common_log_main() { return nullptr; }
void common_log_add(struct common_log *, enum ggml_log_level, const char *, ...) {}
extern "C" int64_t ggml_time_ms(void) { return 0; }
extern "C" void ggml_abort(const char *, int, const char *, ...) { abort(); }

static common_ngram_cache of_text, of_answers, of_corpus;

static void heard(const Tokens & document) {
    Tokens all = document;
    common_ngram_cache_update(of_corpus, LLAMA_NGRAM_STATIC, LLAMA_NGRAM_STATIC, all, all.size(), false);
#if defined(DYNAMIC)  // as if the corpus were earlier answers: its 1- to 4-grams too
    common_ngram_cache_update(of_answers, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, all, all.size(), false);
#endif
}
static void told_all() {}
extern "C" void begin(const int32_t * ids, int count) {
    of_text.clear();
    text.assign(ids, ids + count);
    common_ngram_cache_update(of_text, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, text, count, false);
}
extern "C" int draft(const int32_t * ids, int count, int32_t * found) {
    const int fresh = count - text.size();
    text.assign(ids, ids + count);
    common_ngram_cache_update(of_text, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, text, fresh, false);
    Tokens said = {text.back()};
    common_ngram_cache_draft(text, said, 16, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, of_text, of_answers, of_corpus);
    return written({Tokens(said.begin() + 1, said.end())}, found);
}

#elif defined(ARCTIC)  // as vLLM's SuffixDecodingProposer does at its defaults, but that no document is forgotten

#include "suffix_tree.cc"

static const int DEPTH = 24;
static SuffixTree of_corpus(DEPTH);
static std::unique_ptr<SuffixTree> of_text;
static int documents = 0, answers = 0;  // an answer is learnt like a document, and forgotten as another text begins

static void heard(const Tokens & document) { of_corpus.extend(documents++, document); }
static void told_all() {}
extern "C" void begin(const int32_t * ids, int count) {
    if (answers) of_corpus.remove(documents);
    answers = 0;
    of_text = std::make_unique<SuffixTree>(DEPTH);
    of_text->extend(0, {ids, static_cast<size_t>(count)});
    text.assign(ids, ids + count);
}
extern "C" int draft(const int32_t * ids, int count, int32_t * found) {
    const std::span<const int32_t> fresh(ids + text.size(), ids + count);
    text.assign(ids, ids + count);
    of_text->extend(0, fresh);
    of_corpus.extend(documents, fresh);
    answers = 1;
    const size_t last = std::min<size_t>(DEPTH, text.size());
    const std::span<const int32_t> context(text.data() + text.size() - last, last);
    const Draft own = of_text->speculate(context, DEPTH, 1.0, 0.0, 0.1, false);
    const Draft other = of_corpus.speculate(context, DEPTH, 1.0, 0.0, 0.1, false);
    return written({own.score >= other.score ? own.token_ids : other.token_ids}, found);
}

#elif defined(SGLANG)  // as its NGRAMWorker does at its defaults: SGLANG nodes, CORPUS of them for the corpus

#include "ngram.cpp"
#include "result.cpp"
#include "suffix_automaton.cpp"
#include "trie.cpp"

using namespace sglang::ngram;

static std::unique_ptr<Ngram> program = [] {
    Param given{};
    given.min_bfs_breadth = 1;
    given.max_bfs_breadth = 10;
    given.max_trie_depth = 18;
    given.draft_token_num = SGLANG + 1;  // with the last token of the text
    given.external_sam_budget = CORPUS;
    given.match_type = "BFS";
    auto made = std::make_unique<Ngram>(1 << 20, given);  // more nodes than the trie of a text can have
    made->startExternalCorpusLoad();
    return made;
}();
static bool later = false;

static void heard(const Tokens & document) {
    if (later) program->appendExternalCorpusTokens({SuffixAutomaton::kSeparatorToken});
    later = true;
    program->appendExternalCorpusTokens(document);
}
static void told_all() { program->finishExternalCorpusLoad("corpus"); }
extern "C" void begin(const int32_t * ids, int count) {
    program->synchronize();
    program->reset();
    text.assign(ids, ids + count);
}
extern "C" int draft(const int32_t * ids, int count, int32_t * found) {
    text.assign(ids, ids + count);
    const Tokens tail(text.end() - std::min<size_t>(18, text.size()), text.end());
    program->synchronize();
    const Result said = program->batchMatch({0}, {tail}, {text.size()});
    program->asyncInsert({tail});
    return written(extractLeafPaths_(said), found);
}

#endif
