// data.h - the splits of a run: token shards, or the built-in stories where no shards are named.
#pragma once
#include "config.h"   // Config
#include "options.h"  // Options
#include "shards.h"   // TokenData

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

inline Data open_data(const Options& o, const Config& config) {
  Data data;
  data.train = open_split(o.train, config);
  data.val = open_split(o.val, config);
  data.test = open_split(o.test, config);
  return data;
}
