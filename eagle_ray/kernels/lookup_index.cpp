// Indices of continuations, and draft trees grown from them: what methods/lookup/{suffix,drafter,best_first}.py do in
// Python, with equal results. methods/lookup/native_index.py calls it.
//
// Arithmetic is in doubles and in Python's order, and the compiler must not fuse it (-ffp-contract=off): children of
// nearly equal probability would change places.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

namespace {

constexpr int32_t ROOT = 0, NONE = -1;
constexpr int MAX_COUNTED = 32;        // states whose count one token raises
constexpr int BELIEVED = 64;           // tokens of a context past which a longer one is no surer
constexpr int TRIED = 4;               // contexts of falling length that are asked for children
constexpr int VAGUE = 256;             // different tokens after a context that make it too vague to ask
constexpr double MIN_LEFT = 1.0 / 16;  // probability that longer contexts leave to shorter ones, or these are not asked
constexpr int LONGEST_NGRAM = 4;       // tokens of a context of n-grams
constexpr int LONG_RUN = 4;            // tokens of a run whose continuation counts as a hit
constexpr int FEW = 8;                 // edges of a state that are searched one by one
const double MIN_LOG_VALUE = std::log(1.0 / 256);
constexpr double LARGEST_LOGIT = 16.0, LARGEST_LOG_PROB = -1e-7;

uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Open addressing from a 64-bit key, which is not ~0, to an index.
class Table {
public:
    int32_t find(uint64_t key) const {
        if (keys_.empty())
            return NONE;
        for (size_t at = mixed(key) & mask();; at = (at + 1) & mask()) {
            if (keys_[at] == key)
                return values_[at];
            if (keys_[at] == FREE)
                return NONE;
        }
    }
    void insert(uint64_t key, int32_t value) {
        if (2 * (size_ + 1) > keys_.size())
            grow();
        place(key, value);
        ++size_;
    }
    size_t bytes() const { return keys_.capacity() * sizeof(uint64_t) + values_.capacity() * sizeof(int32_t); }

private:
    static constexpr uint64_t FREE = ~0ull;
    size_t mask() const { return keys_.size() - 1; }
    void place(uint64_t key, int32_t value) {
        size_t at = mixed(key) & mask();
        while (keys_[at] != FREE)
            at = (at + 1) & mask();
        keys_[at] = key;
        values_[at] = value;
    }
    void grow() {
        std::vector<uint64_t> keys(std::max<size_t>(16, 2 * keys_.size()), FREE);
        std::vector<int32_t> values(keys.size());
        keys.swap(keys_);
        values.swap(values_);
        for (size_t i = 0; i < keys.size(); ++i)
            if (keys[i] != FREE)
                place(keys[i], values[i]);
    }
    std::vector<uint64_t> keys_;
    std::vector<int32_t> values_;
    size_t size_ = 0;
};

struct Child {
    int32_t token;
    double probability;
};

// What several contexts of falling length say of the next token: see `interpolate` in drafter.py.
class Shares {
public:
    void begin() {
        shares_.clear();
        left_ = 1.0;
        num_contexts_ = 0;
    }
    bool is_open() const { return left_ >= MIN_LEFT; }
    void begin_context() { first_ = shares_.size(); }
    void add(int32_t token, int32_t count) { shares_.push_back({token, num_contexts_, double(count)}); }
    void end_context(int length) {
        int64_t sum = 0;
        for (size_t i = first_; i < shares_.size(); ++i)
            sum += int64_t(shares_[i].share);
        const double believed = left_ * length / (length + 1) / double(sum);
        for (size_t i = first_; i < shares_.size(); ++i)
            shares_[i].share = believed * shares_[i].share;
        left_ /= length + 1;
        ++num_contexts_;
    }
    void likeliest(size_t width, std::vector<Child> &children) {
        children.clear();
        std::sort(shares_.begin(), shares_.end(), [](const Share &a, const Share &b) {
            return a.token != b.token ? a.token < b.token : a.context < b.context;
        });
        for (const Share &share : shares_) {
            if (children.empty() || children.back().token != share.token)
                children.push_back({share.token, 0.0});
            children.back().probability += share.share;
        }
        const auto is_before = [](const Child &a, const Child &b) {
            return a.probability != b.probability ? a.probability > b.probability : a.token < b.token;
        };
        const size_t kept = std::min(width, children.size());
        std::partial_sort(children.begin(), children.begin() + kept, children.end(), is_before);
        children.resize(kept);
    }

private:
    struct Share {
        int32_t token, context;
        double share;
    };
    std::vector<Share> shares_;
    double left_ = 1.0;
    size_t first_ = 0;
    int32_t num_contexts_ = 0;
};

// The suffix automaton of several growing texts: see SuffixAutomaton in suffix.py.
class Automaton {
public:
    struct State {
        int32_t longest, link, count, first_edge, num_edges;
    };
    struct Edge {
        int32_t token, target, next;
    };

    Automaton() { new_state(0, NONE); }

    int32_t append(int32_t state, int32_t token) {
        ++num_tokens;
        const int32_t edge = find(state, token);
        int32_t grown;
        if (edge != NONE) {
            grown = of_length(state, token, edges[edge].target);
        } else {
            grown = new_state(states[state].longest + 1, ROOT);
            int32_t at = state, known = NONE;
            while (at >= 0 && (known = find(at, token)) == NONE) {
                add_edge(at, token, grown);
                at = states[at].link;
            }
            if (at >= 0) {
                const int32_t link = of_length(at, token, edges[known].target);
                states[grown].link = link;
            }
        }
        int32_t at = grown;
        for (int i = 0; i < MAX_COUNTED && at != ROOT; ++i, at = states[at].link)
            ++states[at].count;
        return grown;
    }

    int32_t find(int32_t state, int32_t token) const {
        const State &from = states[state];
        if (from.num_edges > FEW)
            return table_.find(key(state, token));
        for (int32_t edge = from.first_edge; edge != NONE; edge = edges[edge].next)
            if (edges[edge].token == token)
                return edge;
        return NONE;
    }

    size_t bytes() const {
        return states.capacity() * sizeof(State) + edges.capacity() * sizeof(Edge) + table_.bytes();
    }

    std::vector<State> states;
    std::vector<Edge> edges;
    int64_t num_tokens = 0;

private:
    static uint64_t key(int32_t state, int32_t token) { return uint64_t(uint32_t(state)) << 32 | uint32_t(token); }

    int32_t new_state(int32_t longest, int32_t link) {
        states.push_back({longest, link, 0, NONE, 0});
        return int32_t(states.size() - 1);
    }

    void add_edge(int32_t state, int32_t token, int32_t target) {
        State &from = states[state];
        edges.push_back({token, target, from.first_edge});
        from.first_edge = int32_t(edges.size() - 1);
        ++from.num_edges;
        if (from.num_edges == FEW + 1) {
            for (int32_t edge = from.first_edge; edge != NONE; edge = edges[edge].next)
                table_.insert(key(state, edges[edge].token), edge);
        } else if (from.num_edges > FEW) {
            table_.insert(key(state, token), from.first_edge);
        }
    }

    int32_t of_length(int32_t state, int32_t token, int32_t there) {
        if (states[there].longest == states[state].longest + 1)
            return there;
        const int32_t split = new_state(states[state].longest + 1, states[there].link);
        states[split].count = states[there].count;
        for (int32_t edge = states[there].first_edge; edge != NONE; edge = edges[edge].next) {
            const Edge copied = edges[edge];
            add_edge(split, copied.token, copied.target);
        }
        states[there].link = split;
        for (int32_t edge; state >= 0 && (edge = find(state, token)) != NONE && edges[edge].target == there;
             state = states[state].link)
            edges[edge].target = split;
        return split;
    }

    Table table_;
};

// How often each token followed each run of at most LONGEST_NGRAM tokens of one sequence: see count_ngrams.
class Ngrams {
public:
    struct Follow {
        int32_t token, count, next;
    };

    static void hashes(const int32_t *tail, int length, uint64_t *out) {
        uint64_t hash = 0x9e3779b97f4a7c15ull;
        for (int n = 1; n <= length; ++n) {
            hash = mixed(hash + uint32_t(tail[length - n]) + 1);
            out[n - 1] = hash == ~0ull ? 0 : hash;
        }
    }

    void count(const int32_t *tail, int length, int32_t token) {
        uint64_t keys[LONGEST_NGRAM];
        hashes(tail, length, keys);
        for (int n = 0; n < length; ++n) {
            int32_t context = contexts_.find(keys[n]);
            if (context == NONE) {
                context = int32_t(first_.size());
                contexts_.insert(keys[n], context);
                first_.push_back(NONE);
            }
            int32_t at = first_[context];
            while (at != NONE && follows_[at].token != token)
                at = follows_[at].next;
            if (at != NONE) {
                ++follows_[at].count;
            } else {
                follows_.push_back({token, 1, first_[context]});
                first_[context] = int32_t(follows_.size() - 1);
            }
        }
    }

    void share(const int32_t *tail, int length, Shares &shares) const {
        uint64_t keys[LONGEST_NGRAM];
        hashes(tail, length, keys);
        for (int n = length; n > 0 && shares.is_open(); --n) {
            const int32_t context = contexts_.find(keys[n - 1]);
            if (context == NONE)
                continue;
            shares.begin_context();
            for (int32_t at = first_[context]; at != NONE; at = follows_[at].next)
                shares.add(follows_[at].token, follows_[at].count);
            shares.end_context(n);
        }
    }

    size_t bytes() const {
        return contexts_.bytes() + first_.capacity() * sizeof(int32_t) + follows_.capacity() * sizeof(Follow);
    }

private:
    Table contexts_;
    std::vector<int32_t> first_;
    std::vector<Follow> follows_;
};

// A position in an index. Suffixes: state and length of the match in the young and in the old automaton. N-grams: the
// last tokens, and in `length` their number.
struct Cursor {
    int32_t values[4] = {ROOT, 0, ROOT, 0};
    int32_t length = 0;
};

struct Reader {
    Cursor cursor;
    int32_t last = 0;        // token
    int64_t generation = 0;  // of the young automaton that it read last
    int64_t text = NONE;     // of that generation
    std::unique_ptr<Ngrams> ngrams;
};

class Index {
public:
    virtual ~Index() = default;
    virtual void read(Reader &reader, const int64_t *tokens, int64_t count) = 0;
    virtual void refresh(Reader &) const {}  // after tokens were read by others
    virtual void share(const Reader &reader, const Cursor &cursor, Shares &shares) const = 0;
    virtual Cursor after(const Cursor &cursor, int32_t token) const = 0;
    virtual void reset() = 0;
    virtual size_t bytes() const = 0;
    virtual const std::vector<std::vector<int32_t>> *texts(int) const { return nullptr; }

    std::vector<std::unique_ptr<Reader>> readers;
    std::vector<int64_t> free_readers;
    int64_t num_read = 0, num_hits = 0;  // tokens, and those that had followed the same run before
    struct Node {
        int32_t parent, token, depth;
        double log_value, log_prob;
    };
    std::vector<std::vector<Node>> grown;  // of the last growth, breadth-first
};

class SuffixIndex : public Index {
public:
    explicit SuffixIndex(int64_t capacity) : half_(std::max<int64_t>(1, capacity / 2)) {}

    void read(Reader &reader, const int64_t *tokens, int64_t count) override {
        if (young_.automaton.num_tokens >= half_) {
            old_ = std::move(young_);
            young_ = Generation();
            ++generation_;
        }
        refresh(reader);
        int32_t *at = reader.cursor.values;
        if (reader.text == NONE) {
            reader.text = int64_t(young_.texts.size());
            young_.texts.emplace_back();
        }
        std::vector<int32_t> &text = young_.texts[reader.text];
        for (int64_t i = 0; i < count; ++i) {
            const int32_t token = int32_t(tokens[i]);
            num_hits += is_hit(at, token);
            at[0] = young_.automaton.append(at[0], token);
            text.push_back(token);
            move(old_.automaton, at[2], at[3], token);
        }
        at[1] = young_.automaton.states[at[0]].longest;
        num_read += count;
    }

    // Whether the token has followed a run of LONG_RUN tokens or more that ends here.
    bool is_hit(const int32_t *at, int32_t token) const {
        const Automaton &young = young_.automaton;
        for (int32_t state : {at[0], young.states[at[0]].link})
            if (state >= 0 && young.states[state].longest >= LONG_RUN && young.find(state, token) != NONE)
                return true;
        return at[3] >= LONG_RUN && old_.automaton.find(at[2], token) != NONE;
    }

    // Let a reader go on in the young automaton; where it was is a match in the old one, if that is still there.
    void refresh(Reader &reader) const override {
        if (reader.generation == generation_)
            return;
        int32_t *at = reader.cursor.values;
        const bool was_young = reader.generation == generation_ - 1;
        at[2] = was_young ? at[0] : ROOT;
        at[3] = was_young ? at[1] : 0;
        at[0] = ROOT;
        at[1] = 0;
        reader.generation = generation_;
        reader.text = NONE;
    }

    void share(const Reader &, const Cursor &cursor, Shares &shares) const override {
        Walk walks[2] = {{&young_.automaton, cursor.values[0], cursor.values[1]},
                         {&old_.automaton, cursor.values[2], cursor.values[3]}};
        for (Walk &walk : walks)
            walk.settle();
        for (int tried = 0; tried < TRIED && shares.is_open(); ++tried) {
            Walk &walk = walks[walks[1].length > walks[0].length];
            if (!walk.length)
                return;
            shares.begin_context();
            const Automaton &in = *walk.automaton;
            for (int32_t edge = in.states[walk.state].first_edge; edge != NONE; edge = in.edges[edge].next)
                shares.add(in.edges[edge].token, std::max(in.states[in.edges[edge].target].count, 1));
            shares.end_context(std::min(walk.length, BELIEVED));
            walk.shorten();
            walk.settle();
        }
    }

    Cursor after(const Cursor &cursor, int32_t token) const override {
        Cursor moved = cursor;
        move(young_.automaton, moved.values[0], moved.values[1], token);
        move(old_.automaton, moved.values[2], moved.values[3], token);
        return moved;
    }

    void reset() override {
        young_ = Generation();
        old_ = Generation();
        generation_ += 2;
    }

    size_t bytes() const override {
        size_t sum = 0;
        for (const Generation *each : {&young_, &old_}) {
            sum += each->automaton.bytes();
            for (const auto &text : each->texts)
                sum += text.capacity() * sizeof(int32_t) + sizeof(text);
        }
        return sum;
    }

    const std::vector<std::vector<int32_t>> *texts(int generation) const override {
        return generation ? &young_.texts : &old_.texts;
    }

private:
    struct Generation {
        Automaton automaton;
        std::vector<std::vector<int32_t>> texts;
    };

    // The ever shorter runs that end at a position.
    struct Walk {
        const Automaton *automaton;
        int32_t state, length;

        void shorten() {
            state = automaton->states[state].link;
            length = state >= 0 ? automaton->states[state].longest : 0;
        }
        // Move to the first run that is worth asking; the length is 0 if there is none.
        void settle() {
            while (length) {
                const int32_t edges = automaton->states[state].num_edges;
                if (edges > 0 && edges <= VAGUE)
                    return;
                shorten();
            }
        }
    };

    static void move(const Automaton &automaton, int32_t &state, int32_t &length, int32_t token) {
        while (state >= 0) {
            const int32_t edge = automaton.find(state, token);
            if (edge != NONE) {
                state = automaton.edges[edge].target;
                ++length;
                return;
            }
            state = automaton.states[state].link;
            length = state >= 0 ? automaton.states[state].longest : 0;
        }
        state = ROOT;
        length = 0;
    }

    int64_t half_, generation_ = 0;
    Generation young_, old_;
};

class NgramIndex : public Index {
public:
    void read(Reader &reader, const int64_t *tokens, int64_t count) override {
        if (!reader.ngrams)
            reader.ngrams = std::make_unique<Ngrams>();
        for (int64_t i = 0; i < count; ++i) {
            reader.ngrams->count(reader.cursor.values, reader.cursor.length, int32_t(tokens[i]));
            reader.cursor = after(reader.cursor, int32_t(tokens[i]));
        }
    }
    void share(const Reader &reader, const Cursor &cursor, Shares &shares) const override {
        if (reader.ngrams)
            reader.ngrams->share(cursor.values, cursor.length, shares);
    }
    Cursor after(const Cursor &cursor, int32_t token) const override {
        Cursor moved = cursor;
        if (moved.length == LONGEST_NGRAM) {
            std::copy(cursor.values + 1, cursor.values + LONGEST_NGRAM, moved.values);
            --moved.length;
        }
        moved.values[moved.length++] = token;
        return moved;
    }
    void reset() override {}
    size_t bytes() const override {
        size_t sum = 0;
        for (const auto &reader : readers)
            if (reader && reader->ngrams)
                sum += reader->ngrams->bytes();
        return sum;
    }
};

double calibrated(const float *parameters, double log_prob, bool is_first) {
    const double clamped = std::min(log_prob, LARGEST_LOG_PROB);
    const double logit = clamped - std::log(-std::expm1(clamped));
    const double bounded = std::min(std::max(logit, -LARGEST_LOGIT), LARGEST_LOGIT);
    const double mapped = parameters[0] * bounded + parameters[1] + (is_first ? double(parameters[2]) : 0.0);
    return std::min(mapped, 0.0) - std::log1p(std::exp(-std::fabs(mapped)));
}

}  // namespace

extern "C" {

// What the trees of `rows` sequences are to be, and their size. parameters: [levels, kinds, 3] or null; kinds: of rows.
struct Growth {
    int64_t rows, max_nodes, max_depth, top_k, num_ends, levels, num_kinds;
    const int64_t *readers, *ends, *kinds;
    const float *parameters;
    int64_t num_nodes, depth, width;  // results: of the largest tree, of the deepest, of the widest level
};

void *lookup_open(int32_t is_suffix, int64_t capacity) {
    if (is_suffix)
        return static_cast<Index *>(new SuffixIndex(capacity));
    return static_cast<Index *>(new NgramIndex());
}

void lookup_close(void *index) { delete static_cast<Index *>(index); }

void lookup_reset(void *index) { static_cast<Index *>(index)->reset(); }

int64_t lookup_bytes(void *index) { return int64_t(static_cast<Index *>(index)->bytes()); }

int64_t lookup_add_reader(void *handle) {
    Index &index = *static_cast<Index *>(handle);
    if (index.free_readers.empty()) {
        index.free_readers.push_back(int64_t(index.readers.size()));
        index.readers.emplace_back();
    }
    const int64_t reader = index.free_readers.back();
    index.free_readers.pop_back();
    index.readers[reader] = std::make_unique<Reader>();
    index.readers[reader]->generation = -2;  // of none
    return reader;
}

void lookup_remove_reader(void *handle, int64_t reader) {
    Index &index = *static_cast<Index *>(handle);
    index.readers[reader].reset();
    index.free_readers.push_back(reader);
}

// Read counts[i] further tokens of each reader.
void lookup_read(void *handle, int64_t rows, const int64_t *readers, const int64_t *counts, const int64_t *tokens) {
    Index &index = *static_cast<Index *>(handle);
    for (int64_t i = 0; i < rows; ++i) {
        if (!counts[i])
            continue;
        Reader &reader = *index.readers[readers[i]];
        index.read(reader, tokens, counts[i]);
        tokens += counts[i];
        reader.last = int32_t(tokens[-1]);
    }
}

void lookup_grow(void *handle, Growth *growth) {
    Index &index = *static_cast<Index *>(handle);
    using Node = Index::Node;
    struct Waiting {
        double log_value;
        int64_t order;
        Node node;
        Cursor before;  // the cursor of its parent
    };
    const auto is_later = [](const Waiting &a, const Waiting &b) {
        return a.log_value != b.log_value ? a.log_value < b.log_value : a.order > b.order;
    };
    Shares shares;
    std::vector<Child> children;
    std::vector<Waiting> heap;
    std::vector<Node> nodes;
    std::vector<int32_t> order, at_index;
    index.grown.resize(growth->rows);
    growth->num_nodes = 1;
    growth->depth = growth->width = 0;

    for (int64_t row = 0; row < growth->rows; ++row) {
        Reader &reader = *index.readers[growth->readers[row]];
        index.refresh(reader);
        const int64_t *ends = growth->ends ? growth->ends + row * growth->num_ends : nullptr;
        heap.clear();
        nodes.clear();
        heap.push_back({0.0, 0, {NONE, reader.last, 0, 0.0, 0.0}, reader.cursor});
        int64_t num_seen = 1;
        while (!heap.empty()) {
            std::pop_heap(heap.begin(), heap.end(), is_later);
            const Waiting best = heap.back();
            heap.pop_back();
            const Node &node = best.node;
            nodes.push_back(node);
            if (int64_t(nodes.size()) > growth->max_nodes)
                break;
            if (node.depth == growth->max_depth)
                continue;
            if (node.depth && ends && std::find(ends, ends + growth->num_ends, node.token) != ends + growth->num_ends)
                continue;
            const Cursor cursor = node.depth ? index.after(best.before, node.token) : best.before;
            shares.begin();
            index.share(reader, cursor, shares);
            shares.likeliest(size_t(growth->top_k), children);
            for (size_t rank = 0; rank < children.size(); ++rank) {
                const double log_prob = std::log(children[rank].probability);
                double given = log_prob;
                if (growth->parameters) {
                    const int64_t level = std::min<int64_t>(node.depth, growth->levels - 1);
                    const int64_t set = level * growth->num_kinds + growth->kinds[row];
                    given = calibrated(growth->parameters + 3 * set, log_prob, rank == 0);
                }
                const double log_value = node.log_value + given;
                if (log_value < MIN_LOG_VALUE)
                    break;
                const Node child = {int32_t(nodes.size() - 1), children[rank].token, node.depth + 1, log_value,
                                    log_prob};
                heap.push_back({log_value, num_seen++, child, cursor});
                std::push_heap(heap.begin(), heap.end(), is_later);
            }
        }

        order.resize(nodes.size());
        at_index.resize(nodes.size());
        for (size_t i = 0; i < order.size(); ++i)
            order[i] = int32_t(i);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return nodes[a].depth < nodes[b].depth; });
        for (size_t i = 0; i < order.size(); ++i)
            at_index[order[i]] = int32_t(i);
        std::vector<Node> &sorted = index.grown[row];
        sorted.clear();
        int64_t in_level = 0;
        for (const int32_t i : order) {
            Node node = nodes[i];
            if (node.parent != NONE)
                node.parent = at_index[node.parent];
            in_level = sorted.empty() || sorted.back().depth != node.depth ? 1 : in_level + 1;
            if (node.depth)
                growth->width = std::max(growth->width, in_level);
            sorted.push_back(node);
        }
        growth->num_nodes = std::max(growth->num_nodes, int64_t(sorted.size()));
        growth->depth = std::max<int64_t>(growth->depth, sorted.back().depth);
    }
}

// Write the trees grown last. integers: tokens, parents, depths [3, rows, num_nodes]; floats: log values and
// log-probabilities [2, rows, num_nodes]; levels: [depth, rows, width].
void lookup_write(void *handle, const Growth *growth, int64_t num_nodes, int64_t *integers, float *floats,
                  uint8_t *valid, float *levels) {
    const Index &index = *static_cast<Index *>(handle);
    const int64_t size = growth->rows * num_nodes;
    if (levels)
        std::fill(levels, levels + growth->depth * growth->rows * growth->width, -INFINITY);
    for (int64_t row = 0; row < growth->rows; ++row) {
        const auto &nodes = index.grown[row];
        int64_t depth = 0, in_level = 0;
        for (int64_t i = 0; i < num_nodes; ++i) {
            const bool is_node = i < int64_t(nodes.size());
            const Index::Node node = is_node ? nodes[i] : Index::Node{NONE, 0, 0, -INFINITY, -INFINITY};
            const int64_t at = row * num_nodes + i;
            integers[at] = node.token;
            integers[size + at] = node.parent;
            integers[2 * size + at] = node.depth;
            floats[at] = float(node.log_value);
            floats[size + at] = float(node.log_prob);
            valid[at] = is_node;
            if (!levels || !is_node || !node.depth)
                continue;
            in_level = node.depth == depth ? in_level + 1 : 0;
            depth = node.depth;
            levels[((depth - 1) * growth->rows + row) * growth->width + in_level] = float(node.log_value);
        }
    }
}

// The texts that are kept, the oldest first: their number, and the tokens of all.
void lookup_hits(void *handle, int64_t *num_read, int64_t *num_hits) {
    *num_read = static_cast<Index *>(handle)->num_read;
    *num_hits = static_cast<Index *>(handle)->num_hits;
}

void lookup_num_texts(void *handle, int64_t *num_texts, int64_t *num_tokens) {
    *num_texts = *num_tokens = 0;
    for (int generation = 0; generation < 2; ++generation) {
        const auto *texts = static_cast<Index *>(handle)->texts(generation);
        if (!texts)
            return;
        *num_texts += int64_t(texts->size());
        for (const auto &text : *texts)
            *num_tokens += int64_t(text.size());
    }
}

void lookup_texts(void *handle, int64_t *lengths, int32_t *tokens) {
    for (int generation = 0; generation < 2; ++generation) {
        const auto *texts = static_cast<Index *>(handle)->texts(generation);
        if (!texts)
            return;
        for (const auto &text : *texts) {
            *lengths++ = int64_t(text.size());
            tokens = std::copy(text.begin(), text.end(), tokens);
        }
    }
}
}
