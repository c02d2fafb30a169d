//! What others write costs what it weighs: no text of a record, a VM's configuration, a domain, a VMI or a guest's
//! request makes a parser or a translator take more memory or more steps than a multiple of its length and a constant.
//!
//! The table in `input_costs/targets.rs` has one row for each parser, with its multiple and its constant. Steps are
//! counted, not timed: all bytes that are ever allocated, and the allocations. What is allocated in all is also at least
//! the peak.
//!
//! A run tries each shape of `input_costs/hostile.rs` at each parser, then random texts. With `XDP_IMDS_INPUTS` it
//! tries so many of them: `XDP_IMDS_INPUTS=5000000 cargo test -p xdp-imds-tests --test inputs input_costs -- --nocapture`.

mod targets;

use std::fs;
use std::path::PathBuf;
use std::sync::{LazyLock, MutexGuard};

use fastrand::Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use stats_alloc::Region;
use support::seed;
use targets::{TARGETS, Target};

use super::ALLOCATOR;

/// The number of random texts of a run.
const INPUTS: &str = "XDP_IMDS_INPUTS";
/// Random texts of a usual run.
const USUAL: usize = 4_000;
/// Bytes of a random text, at most.
const LONGEST: usize = 16 << 10;
/// Bytes of the shapes: the second is twice the first, and costs at most about twice as much.
const LENGTHS: [usize; 2] = [8 << 10, 16 << 10];
/// How much more twice the input may cost, in quarters: growth of tables and lists goes by powers of two.
const TWICE: usize = 10;
/// Bytes and allocations that no comparison of two lengths counts.
const SLACK: usize = 256 << 10;
/// Most memory of the process. A parser without a limit ends the test here, and not the machine.
const ADDRESS_SPACE: u64 = 4 << 30;

/// What one input cost.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// All bytes that were allocated, although most were freed again.
    bytes: usize,
    /// Allocations.
    steps: usize,
}

/// Lets one test allocate at a time, within the limit.
fn alone() -> MutexGuard<'static, ()> {
    let alone = super::alone();
    let maximum = getrlimit(Resource::As).maximum;
    let current = Some(maximum.map_or(ADDRESS_SPACE, |maximum| maximum.min(ADDRESS_SPACE)));
    setrlimit(Resource::As, Rlimit { current, maximum }).expect("a lower limit");
    alone
}

/// The input that a target reads now. If it ends the process, the file has it.
fn last() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("input_costs.last")
}

fn cost(target: &Target, text: &str) -> Cost {
    let region = Region::new(ALLOCATOR);
    (target.run)(text);
    let change = region.change();
    Cost { bytes: change.bytes_allocated, steps: change.allocations + change.reallocations }
}

/// Reads a text and asserts the law of its length.
fn assert_law(target: &Target, shape: &str, text: &str) -> Cost {
    fs::write(last(), format!("{}\n{text}", target.name)).expect("a file");
    let cost = cost(target, text);
    let most = target.times * text.len() + target.bytes;
    let start: String = text.chars().take(2_000).collect();
    assert!(
        cost.bytes <= most,
        "{}: expected at most {} bytes for each of {} and {} besides, found {cost:?}; {shape}: {start}",
        target.name,
        target.times,
        text.len(),
        target.bytes,
    );
    cost
}

fn shapes() -> impl Iterator<Item = &'static Shape> {
    SHAPES.iter().chain(&OTHERS)
}

#[test]
fn every_parser_takes_memory_and_steps_in_proportion_to_its_input() {
    let _alone = alone();
    let only = std::env::var("XDP_IMDS_TARGET").ok();
    for target in TARGETS.iter().filter(|target| only.as_ref().is_none_or(|only| target.name == only)) {
        // The first run also makes what all share.
        cost(target, "a: 1");
        let mut most = (0, "");
        for (shape, make) in shapes() {
            let [once, twice] = LENGTHS.map(|length| assert_law(target, shape, &make(length)));
            let allowed = |count: usize| count * TWICE / 4 + SLACK;
            assert!(
                twice.bytes <= allowed(once.bytes) && twice.steps <= allowed(once.steps),
                "{}: expected twice the cost for twice the input, found {once:?} and {twice:?}: {shape}",
                target.name,
            );
            most = most.max((twice.bytes, shape));
        }
        eprintln!("{}: at most {} KiB for {} KiB: {}", target.name, most.0 >> 10, LENGTHS[1] >> 10, most.1);
    }
}

#[test]
fn random_texts_cost_what_they_weigh_too() {
    let _alone = alone();
    let mut random = Rng::with_seed(seed());
    let inputs = std::env::var(INPUTS).map_or(USUAL, |text| text.parse().expect("a number of inputs"));
    let all: Vec<_> = shapes().collect();
    for (number, target) in (0..inputs).zip(TARGETS.iter().cycle()) {
        let length = 1 << random.u32(4..=LONGEST.ilog2());
        let text = match random.u8(..4) {
            0 => words(&mut random, length),
            _ => {
                let text = all[random.usize(..all.len())].1(length);
                mutate(&mut random, &text)
            }
        };
        assert_law(target, "random", &text);
        if number % 100_000 == 99_999 {
            eprintln!("{} inputs", number + 1);
        }
    }
}

// Texts of hostile authors: each is a shape that costs more than it weighs, if a parser lets it, at about the wished
// length in bytes.

/// The characters of random words: letters, marks of YAML, JSON and XML, and odd ones of Unicode.
static CHARACTERS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    "\
    a·0·9· ·\n·\r\n·\t·:·: ·- ·,·[·]·{·}·\"·'·&a ·*a·<<: ·? ·|·>·#· #·!·!!str ·%·@·`·\\·\\u0000·\\x41·\
    ---\n·...\n·~·null·true·yes·1e999·0x·-·.·<·>·&amp;·<![CDATA[·]]>·<!--·/·=·\u{feff}·\u{0}·\u{7f}·\
    \u{85}·\u{a0}·\u{2028}·\u{202e}·\u{301}·\u{fffd}·\u{10ffff}·é·😀·\u{1b}[2J"
        .split('·')
        .collect()
});

fn list(item: &str, bytes: usize) -> String {
    vec![item; (bytes / (item.len() + 1)).max(1)].join(",")
}

/// Nested anchors, each a list of the one before.
fn laughs(bytes: usize) -> String {
    const LEVELS: usize = 6;
    let each = bytes / LEVELS;
    let mut text = format!("{{version: 2, l0: &l0 [{}]", list("x", each));
    for n in 1..LEVELS {
        text.push_str(&format!(", l{n}: &l{n} [{}]", list(&format!("*l{}", n - 1), each)));
    }
    text + "}\n"
}

/// Nested anchors within the parser's budget, in a mapping that is a key, so that each level is kept once more.
fn key_of_aliases(bytes: usize) -> String {
    let [l0, l1, l2] = [list("x", 42), list("*l0", 40), list("*l1", 40)];
    let text = format!("{{version: 2, l0: &l0 [{l0}], l1: &l1 [{l1}], l2: &l2 [{l2}]}}: x # ");
    let rest = bytes.saturating_sub(text.len());
    text + &"x".repeat(rest) + "\n"
}

/// One long scalar, and as many aliases of it as fit.
fn echoes(bytes: usize) -> String {
    format!("version: 2\na: &a \"x\\n{}\"\nb: [{}]\n", "x".repeat(bytes / 2), list("*a", bytes / 2))
}

/// Mappings that merge each other.
fn merges(bytes: usize) -> String {
    let mut text = String::from("version: 2\nm0: &m0 {k: v}\n");
    for n in 1.. {
        if text.len() >= bytes {
            break;
        }
        let below = n - 1;
        text.push_str(&format!("m{n}: &m{n} {{<<: [*m{below}, *m{below}], k{n}: *m{below}}}\n"));
    }
    text
}

/// Anchors inside each other, so that each node is kept for all that surround it.
fn nests(bytes: usize) -> String {
    let levels = (bytes / 32).min(60);
    let open: String = (0..levels).map(|n| format!("&n{n} [")).collect();
    format!("a: {open}{}{}\n", list("x", bytes / 2), "]".repeat(levels))
}

/// A tag whose prefix is long, used often.
fn tags(bytes: usize) -> String {
    format!("%TAG !e! tag:{}\n---\na: [{}]\n", "x".repeat(bytes / 2), list("!e!t 1", bytes / 2))
}

fn keys(bytes: usize, mut key: impl FnMut(usize) -> String) -> String {
    let mut text = String::new();
    for n in 0.. {
        if text.len() >= bytes {
            break;
        }
        text.push_str(&key(n));
    }
    text
}

/// A shape of text, by name.
pub(crate) type Shape = (&'static str, fn(usize) -> String);

/// Shapes of YAML; those with braces alone are JSON, too.
pub(crate) const SHAPES: [Shape; 34] = [
    ("laughs", laughs),
    ("a key of aliases", key_of_aliases),
    ("echoes", echoes),
    ("merges", merges),
    ("nests", nests),
    ("tags", tags),
    ("deep lists", |n| "[".repeat(n / 2) + &"]".repeat(n / 2)),
    ("open lists", |n| "[".repeat(n)),
    ("open mappings", |n| "{\"a\":".repeat(n / 5)),
    ("deep mappings", |n| "{\"a\":".repeat(n / 6) + "1" + &"}".repeat(n / 6)),
    ("deep blocks", |n| (0..n.isqrt()).map(|n| format!("{}a:\n", " ".repeat(n))).collect()),
    ("deep dashes", |n| "- ".repeat(n / 2)),
    ("many zeros", |n| format!("[{}]", list("0", n))),
    ("many texts", |n| format!("{{\"a\":[{}]}}", list("\"\"", n))),
    ("small mappings", |n| format!("[{}]", list("{\"a\":0}", n))),
    ("empty lists", |n| format!("{{\"network\":{{}},\"version\":2,\"a\":[{}]}}", list("[]", n))),
    ("many keys", |n| keys(n, |n| format!("k{n}: v\n"))),
    ("many keys of JSON", |n| format!("{{{}\"z\":1}}", keys(n, |n| format!("\"k{n}\":1,")))),
    ("one key again and again", |n| keys(n, |_| "k: v\n".into())),
    ("many nics", |n| {
        format!(
            "{{\"network\":{{\"nics\":[{}{{}}]}}}}",
            keys(n, |n| format!("{{\"mac\":\"52:54:00:{n:06x}\"}},"))
        )
    }),
    ("long plain", |n| format!("version: 2\na: {}\n", "x".repeat(n))),
    ("long words", |n| format!("a: {}\n", "x ".repeat(n / 2))),
    ("long quoted", |n| format!("{{\"a\": \"{}\"}}", "\\u00e9".repeat(n / 6))),
    ("long block", |n| format!("a: |\n{}", "  line\n".repeat(n / 7))),
    ("long folded", |n| format!("a: >\n{}", "  line\n\n".repeat(n / 8))),
    ("long comment", |n| format!("# {}\n", "x".repeat(n))),
    ("many comments", |n| "# x\n".repeat(n / 4)),
    ("long number", |n| format!("{{\"a\": 1{}}}", "0".repeat(n))),
    ("huge exponent", |n| format!("{{\"a\": 1e{}}}", "9".repeat(n))),
    ("many documents", |n| "---\na: 1\n".repeat(n / 9)),
    ("many lines", |n| "\r\n".repeat(n / 2)),
    ("nothing but NUL", |n| "\0".repeat(n)),
    ("complex keys", |n| "? [a]\n: b\n".repeat(n / 10)),
    ("spaces", |n| format!("a:{}b", " ".repeat(n))),
];

/// Shapes of XML, of lists of settings, and of forms, which no YAML has.
pub(crate) const OTHERS: [Shape; 14] = [
    ("elements", |n| format!("<a>{}</a>", "<b/>".repeat(n / 4))),
    ("open elements", |n| "<a>".repeat(n / 3)),
    ("deep elements", |n| "<a>".repeat(n / 7) + &"</a>".repeat(n / 7)),
    ("attributes", |n| format!("<a {}/>", keys(n, |n| format!("a{n}='' ")))),
    ("namespaces", |n| format!("<a {}/>", keys(n, |n| format!("xmlns:n{n}='u' ")))),
    ("namespaces inside", |n| {
        let half = keys(n / 2, |n| format!("xmlns:n{n}='u' "));
        format!("<a {half}>{}</a>", "<b xmlns:z='z'/>".repeat(n / 32))
    }),
    ("entities", |n| {
        let inner = "&a;".repeat(n / 3);
        format!("<!DOCTYPE x [<!ENTITY a \"{}\">]><x>{inner}</x>", "x".repeat(n / 3))
    }),
    ("references", |n| format!("<a>{}</a>", "&amp;".repeat(n / 5))),
    ("comments", |n| format!("<a>{}</a>", "x<!---->".repeat(n / 8))),
    ("settings", |n| keys(n, |n| format!("net{n}: virtio=BC:24:11:2C:69:EC,bridge=vmbr0\n"))),
    ("notes", |n| "#\n".repeat(n / 2)),
    ("percents", |n| format!("#{}\n", "%41".repeat(n / 3))),
    ("commas", |n| format!("smbios1: {}\n", keys(n, |n| format!("k{n}=v,")))),
    ("fields of a form", |n| keys(n, |n| format!("k{n}=v%00&"))),
];

/// A random text of at most `bytes`.
pub(crate) fn words(random: &mut Rng, bytes: usize) -> String {
    let few: Vec<_> = (0..random.usize(1..8)).map(|_| CHARACTERS[random.usize(..CHARACTERS.len())]).collect();
    let mut text = String::new();
    while text.len() < bytes {
        let all = random.u8(..4) == 0;
        text.push_str(if all {
            CHARACTERS[random.usize(..CHARACTERS.len())]
        } else {
            few[random.usize(..few.len())]
        });
        if random.u8(..64) == 0 {
            text.push_str(&few[random.usize(..few.len())].repeat(random.usize(..64)));
        }
    }
    text
}

/// Changes a text at some places, by pieces of it and of [`CHARACTERS`].
pub(crate) fn mutate(random: &mut Rng, text: &str) -> String {
    let mut text: Vec<char> = text.chars().collect();
    for _ in 0..random.usize(1..6) {
        let at = random.usize(..=text.len());
        let end = random.usize(at..=text.len().min(at + 64));
        match random.u8(..4) {
            0 => drop(text.drain(at..end)),
            1 => {
                let piece: Vec<char> = text[at..end].to_vec();
                let times = random.usize(1..32);
                text.splice(at..at, piece.repeat(times)).for_each(drop);
            }
            2 => text.truncate(at),
            _ => {
                let piece = CHARACTERS[random.usize(..CHARACTERS.len())];
                text.splice(at..at, piece.chars()).for_each(drop);
            }
        }
    }
    text.into_iter().collect()
}
