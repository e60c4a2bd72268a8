// test_stories.cpp - the built-in stories, read back by a reader who knows nothing of how they were made.
#include <cmath>
#include <map>
#include <set>
#include <sstream>

#include "data/stories.h"
#include "tests/check.h"

constexpr size_t LENGTH = 160, MANY = 3000;
constexpr const char* GOLDEN =  // story 0: a change of the generator changes everybody's data
    "Ann took the pen. Ann took the fan. Bob went to Lima.\nWhere is Bob? Lima.\nWho has the pen? Ann.\n"
    "Ann went to York.\nWho has the fan? Ann.\n";
// A reader who always gives the last name of the right sort: right nearly always about the last sentence
// (kind 0), not elsewhere.
constexpr double MOST_LATEST[NUM_STORY_KINDS] = {1, 0.5, 0.35, 0.45, 0.6};
const StorySplit SPLITS[] = {StorySplit::train, StorySplit::val, StorySplit::test};

// ---- a reader ------------------------------------------------------------------------------------------
// Reads sentences one after the other, keeps track of the world they tell of, and answers questions about it.
// It works from the words alone. `broken` says what cannot be so: somebody takes what lies elsewhere, gives
// what they do not have.
struct Reader {
  std::map<std::string, std::string> holder;  // of a thing
  std::map<std::string, std::string> place;   // of a person or a thing
  std::string broken;

  static std::vector<std::string> words(const std::string& sentence) {
    std::istringstream stream(sentence);
    std::vector<std::string> all;
    for (std::string word; stream >> word;) all.push_back(word.substr(0, word.find_first_of(".?")));
    return all;
  }
  void go(const std::string& who, const std::string& where) {
    place[who] = where;
    for (const auto& one : holder)
      if (one.second == who) place[one.first] = where;
  }
  // Two who meet are in one place, which one of them may tell. False if they cannot meet.
  bool meet(const std::string& a, const std::string& b) {
    if (place[a].empty()) go(a, place[b]);
    if (place[b].empty()) go(b, place[a]);
    return place[a] == place[b];
  }
  void read(const std::string& sentence) {
    const std::vector<std::string> w = words(sentence);
    const std::string who = w[0], verb = w[1], thing = w[3];
    bool sound = true;
    if (verb == "went") {  // Ann went to Rome
      sound = w.size() == 4 && place[who] != w[3];
      go(who, w[3]);
    } else if (verb == "left") {  // Ann left the pen in Rome
      sound = w.size() == 6 && (holder[thing].empty() || holder[thing] == who) && place[thing] != w[5];
      holder[thing] = "";
      go(who, w[5]);
      place[thing] = w[5];
    } else if (verb == "took") {  // Ann took the pen
      sound = w.size() == 4 && holder[thing].empty() && meet(who, thing);
      holder[thing] = who;
    } else {  // Ann gave the pen to Bob
      sound = verb == "gave" && w.size() == 6 && holder[thing] == who && w[5] != who && meet(who, w[5]);
      holder[thing] = w[5];
    }
    if (!sound) broken = sentence;
  }
  std::string answer(const std::string& question) {
    const std::vector<std::string> w = words(question);
    return w[0] == "Who" ? holder[w[3]] : place[w[2] == "the" ? w[3] : w[2]];  // Where is (the) X
  }
};

// The sentences of a story, each up to its full stop; a question with its answer.
std::vector<std::string> sentences_of(const std::string& story) {
  std::vector<std::string> all;
  for (size_t from = 0, end; from < story.size(); from = end + 1) {  // + 1: the blank or the line break
    end = story.compare(from, 2, "Wh") == 0 ? story.find('\n', from) : story.find('.', from) + 1;
    all.push_back(story.substr(from, end - from));
  }
  return all;
}

void test_reading() {
  TEST("a reader of the words alone answers every question, from the last sentence only the first kind");
  size_t asked = 0, first_kind = 0;
  for (StorySplit split : SPLITS)
    for (size_t n = 0; n < MANY; n++) {
      const Story story = tell_story(split, n, n % 2 ? LENGTH : 256);
      Reader reader, before;  // of all sentences so far; of all but the last
      size_t q = 0;
      for (const std::string& sentence : sentences_of(story.text)) {
        if (sentence.compare(0, 2, "Wh") != 0) {
          before = reader;
          reader.read(sentence);
          continue;
        }
        if (!CHECK(q < story.questions.size())) return;
        const StoryQuestion& question = story.questions[q++];
        const std::string words = sentence.substr(0, sentence.find('?') + 1), answer = reader.answer(words);
        CHECK_EQ(question.answer, answer);
        CHECK_EQ(sentence, words + " " + answer + ".");
        CHECK_EQ(before.answer(words) != answer, question.kind == StoryKind::just_told);
        first_kind += question.kind == StoryKind::just_told;
      }
      CHECK_EQ(q, story.questions.size());
      CHECK_EQ(reader.broken, "");
      asked += q;
    }
  printf("     %zu questions in %zu stories, %zu of the first kind\n", asked, 3 * MANY, first_kind);
  CHECK(asked > 3 * MANY && first_kind > MANY);
}

void test_shape() {
  TEST("stories are ASCII lines of at most the length asked for, answers are where they are said to be");
  for (size_t length : {size_t(64), size_t(100), LENGTH, size_t(256), size_t(1000)})
    for (size_t n = 0; n < 300; n++) {
      const Story story = tell_story(StorySplit::train, n, length);
      const std::vector<int> tokens = story.tokens();
      CHECK(tokens.size() <= length && tokens.size() == story.text.size() + 1);
      CHECK_EQ(tokens[0], 256);
      CHECK(!story.questions.empty() && story.text.back() == '\n');
      for (char c : story.text) CHECK(c == '\n' || (c >= ' ' && c <= '~'));
      CHECK(story.text.find("  ") == std::string::npos && story.text.find("\n\n") == std::string::npos);
      size_t last = 0;
      for (const StoryQuestion& q : story.questions) {
        CHECK_EQ(std::string(tokens.begin() + long(q.begin), tokens.begin() + long(q.end)), q.answer);
        CHECK(q.begin > last && tokens[q.begin - 1] == ' ');
        CHECK(tokens[q.end] == '.' && tokens[q.end + 1] == '\n');
        last = q.end;
      }
    }

  TEST("a story is a function of its number, its split and the length, and of nothing else");
  std::set<std::string> different;
  for (StorySplit split : SPLITS)
    for (uint64_t number : {uint64_t(0), uint64_t(1), uint64_t(1) << 40, uint64_t(3) << 40})
      different.insert(tell_story(split, number, LENGTH).text);
  CHECK_EQ(different.size(), size_t(12));
  CHECK_EQ(tell_story(StorySplit::train, 0, LENGTH).text, std::string(GOLDEN));
}

void test_splits() {
  TEST("no held-out story is a training story, no test story a validation story");
  std::map<std::string, StorySplit> split_of;
  for (StorySplit split : SPLITS)
    for (size_t n = 0; n < (split == StorySplit::train ? 30000 : 5000); n++)
      CHECK(split_of.emplace(tell_story(split, n, LENGTH).text, split).first->second == split);
  printf("     %zu different texts of 40000\n", split_of.size());

  TEST("story_tokens: one story after the other, each in a window of its own, as many as asked for");
  const std::vector<uint16_t> tokens = story_tokens(StorySplit::val, 5000, LENGTH);
  CHECK_EQ(tokens.size(), (5000 / LENGTH + 1) * LENGTH);
  for (size_t n = 0; (n + 1) * LENGTH < tokens.size(); n++) {  // the last target is the next story's first
    std::vector<int> inputs(LENGTH), targets(LENGTH);
    tell_story(StorySplit::val, n, LENGTH).window(LENGTH, inputs.data(), targets.data());
    CHECK(std::equal(inputs.begin(), inputs.end(), tokens.begin() + n * LENGTH));
    CHECK(std::equal(targets.begin(), targets.end(), tokens.begin() + n * LENGTH + 1));
  }
}

void test_guessing() {
  TEST("every kind is asked, and answers cannot be guessed: not from the kind, not from the question's words");
  StoryMarks marks;
  std::map<std::string, StoryMarks> by_question;
  for (size_t n = 0; n < 20000; n++) {
    const Story story = tell_story(StorySplit::train, n, LENGTH);
    for (StoryQuestion q : story.questions) {
      marks.add(q, true);
      const size_t from = story.text.rfind('\n', q.begin - 2) + 1;  // npos + 1 is 0
      q.kind = StoryKind::just_told;                                // all as one
      by_question[story.text.substr(from, story.text.find('?', from) - from)].add(q, true);
    }
  }
  // Six answers, equally likely: standard deviations by which the most frequent exceeds a sixth.
  const auto excess = [](const StoryMarks::Row& row) {
    return (double(row.guessed) / double(row.asked) - 1.0 / 6) / std::sqrt(5.0 / 36 / double(row.asked));
  };
  const size_t asked = marks.total().asked;
  for (size_t k = 0; k < NUM_STORY_KINDS; k++) {
    const StoryMarks::Row row = marks.row(StoryKind(k));
    const double latest = double(row.latest) / double(row.asked);
    printf("     %-26s %6zu asked, latest name %.3f\n", STORY_KIND_NAMES[k], row.asked, latest);
    CHECK(row.asked > asked / 100);
    CHECK(excess(row) < 4);
    CHECK(latest <= MOST_LATEST[k]);
  }
  const StoryMarks::Row back = marks.total(StoryKind::where_person);  // one must look back
  CHECK(back.asked > 0.6 * double(asked) && back.latest < 0.45 * double(back.asked));
  CHECK_EQ(by_question.size(), size_t(18));
  for (const auto& question : by_question) CHECK(excess(question.second.total()) < 5);
}

void test_marks() {
  TEST("marking counts by kind: right answers, the most frequent one, the last name");
  StoryMarks marks;
  marks.add({StoryKind::who_has, 0, 0, "Ann", "Ann"}, true);
  marks.add({StoryKind::who_has, 0, 0, "Ann", "Bob"}, false);
  marks.add({StoryKind::who_has, 0, 0, "Bob", "Ann"}, true);
  marks.add({StoryKind::just_told, 0, 0, "Rome", "Oslo"}, false);
  const StoryMarks::Row all = marks.total(), back = marks.total(StoryKind::where_person);
  CHECK(all.asked == 4 && all.right == 2 && all.guessed == 3 && all.latest == 1);
  CHECK(back.asked == 3 && back.right == 2 && back.guessed == 2 && back.latest == 1);
}

void test_hash() {
  TEST("sha256_prefix: the published examples");
  CHECK_EQ(sha256_prefix(""), 0xe3b0c442u);
  CHECK_EQ(sha256_prefix("abc"), 0xba7816bfu);
  CHECK_EQ(sha256_prefix("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"), 0x248d6a61u);
  CHECK_EQ(sha256_prefix(std::string(1000000, 'a')), 0xcdc76e5cu);
}

int main() {
  test_reading();
  test_shape();
  test_splits();
  test_guessing();
  test_marks();
  test_hash();
  return finish();
}
