// data.h - the splits of a run: token shards, or the built-in stories where no shards are named.
#pragma once
#include "../../data/stories.h"  // story_tokens: the built-in corpus
#include "config.h"              // Config
#include "options.h"             // Options
#include "shards.h"              // TokenData

struct Data {
  TokenData train, val, test;  // one that was not asked for has no tokens
  bool stories = false;        // the built-in corpus: its questions can be marked right or wrong

  std::vector<std::pair<const char*, const TokenData*>> splits() const {
    std::vector<std::pair<const char*, const TokenData*>> present;
    if (train.num_tokens() > 0) present.push_back({"train", &train});
    if (val.num_tokens() > 0) present.push_back({"val", &val});
    if (test.num_tokens() > 0) present.push_back({"test", &test});
    return present;
  }
};

inline TokenData open_split(const std::string& pattern, const Config& config) {
  if (pattern.empty()) return {};
  TokenData data = TokenData::from_glob(pattern, config.V);
  data.require_window(config.T);
  return data;
}

// How many tokens of stories there are. Fixed, so that a run made longer goes on with the same data.
constexpr size_t STORY_TRAIN_TOKENS = 8 << 20, STORY_VAL_TOKENS = 1 << 17, STORY_MIN_CONTEXT = 64;

inline TokenData open_stories(StorySplit split, const char* name, size_t tokens, const Config& config) {
  TokenData data = TokenData::from_tokens(story_tokens(split, tokens, config.T), name, config.V);
  data.require_window(config.T);
  return data;
}

// Every split of the run. Fatal if one holds no window, or if a validation would read none.
inline Data open_data(const Options& o, const Config& config) {
  Data data;
  const bool validates = !o.val.empty() || !o.test.empty() || o.train.empty();
  if (validates && o.val_tokens > 0 && o.val_tokens < config.T)
    fatal(EXIT_USAGE,
          "--val-tokens: got %zu, expected at least one window of --context %zu tokens, or 0: the whole split",
          o.val_tokens, config.T);
  if (o.train.empty() && o.val.empty() && o.test.empty()) {
    if (config.T < STORY_MIN_CONTEXT)
      fatal(EXIT_USAGE,
            "--context: got %zu, expected at least %zu: the built-in stories need room for a"
            " question",
            config.T, STORY_MIN_CONTEXT);
    data.stories = true;
    data.train = open_stories(StorySplit::train, "built-in stories", STORY_TRAIN_TOKENS, config);
    data.val = open_stories(StorySplit::val, "held-out stories", STORY_VAL_TOKENS, config);
    return data;
  }
  data.train = open_split(o.train, config);
  data.val = open_split(o.val, config);
  data.test = open_split(o.test, config);
  return data;
}
