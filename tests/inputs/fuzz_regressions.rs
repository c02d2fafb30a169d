//! Every parser of untrusted input keeps its laws on every seed of the fuzz corpora and on mutated seeds.

#[path = "../fuzz/fuzz_targets/answer.rs"]
mod answer;
#[path = "../fuzz/fuzz_targets/classify.rs"]
mod classify;
#[path = "../fuzz/fuzz_targets/config.rs"]
mod config;
#[path = "../fuzz/fuzz_targets/frames.rs"]
mod frames;
#[path = "../fuzz/fuzz_targets/http.rs"]
mod http;
#[path = "../fuzz/fuzz_targets/identity.rs"]
mod identity;
#[path = "../fuzz/fuzz_targets/record.rs"]
mod record;
#[path = "../fuzz/fuzz_targets/router.rs"]
mod router;
#[path = "../fuzz/fuzz_targets/segments.rs"]
mod segments;
#[path = "../fuzz/fuzz_targets/snapshot.rs"]
mod snapshot;
#[path = "../fuzz/fuzz_targets/token.rs"]
mod token;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use stats_alloc::Region;
use support::{frames as named, seed, vectors};

use super::{ALLOCATOR, alone};

/// All bytes that one input may make a law allocate, at most: a law renders every dialect of a record and asks for
/// every path. `input_costs` has the limits of the parsers themselves, by the length of the input.
const ALLOCATED_MOST: usize = 512 << 20;

/// If set to 1, tests write the seeds of vectors and named frames before they compare them.
const WRITE: &str = "XDP_IMDS_WRITE_SEEDS";

type Law = fn(&[u8]);

/// Each target with its law and the number of mutated inputs.
const TARGETS: [(&str, Law, usize); 11] = [
    ("answer", answer::assert_all, 3_000),
    ("classify", classify::assert_all, 200_000),
    ("config", config::assert_all, 1_000),
    ("frames", frames::assert_all, 300),
    ("http", http::assert_all, 1_500),
    ("identity", identity::assert_all, 2_000),
    ("router", router::assert_all, 3_000),
    ("record", record::assert_all, 400),
    ("segments", segments::assert_all, 1_000),
    ("snapshot", snapshot::assert_all, 400),
    ("token", token::assert_all, 1_000),
];

fn directory(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

fn corpus(target: &str) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(directory(target)).expect("the corpus is in the tree");
    let seed = |file: std::io::Result<fs::DirEntry>| {
        let file = file.expect("a readable directory");
        let name = file.file_name().into_string().expect("a plain name");
        (name, fs::read(file.path()).expect("a readable seed"))
    };
    files.map(seed).collect()
}

/// One request of each kind in the vectors: the first with its method, address and first two path segments.
fn requests() -> BTreeMap<String, Vec<u8>> {
    let mut seen = HashSet::new();
    let mut kinds = BTreeMap::new();
    for vector in vectors::all(vectors::ALL) {
        let (method, target) = vector.request().expect("a request");
        let path = target.split('?').next().unwrap_or_default();
        let beginning: Vec<_> = path.split('/').filter(|segment| !segment.is_empty()).take(2).collect();
        if seen.insert((method.to_owned(), vector.to(), beginning.join("/"))) {
            kinds.insert(vector.n.clone(), vector.as_text().into_bytes());
        }
    }
    kinds
}

/// Asserts that the corpus of a target has each of these inputs under its name.
fn assert_seeds(target: &str, inputs: BTreeMap<String, Vec<u8>>) {
    let _alone = alone();
    if std::env::var_os(WRITE).is_some_and(|value| value == "1") {
        fs::create_dir_all(directory(target)).expect("a place for the corpus");
        for (name, input) in &inputs {
            fs::write(directory(target).join(name), input).expect("a seed is written");
        }
    }
    let corpus = corpus(target);
    for (name, input) in inputs {
        assert_eq!(corpus.get(&name), Some(&input), "{name}: {WRITE}=1 rewrites the seeds");
    }
}

#[test]
fn every_kind_of_request_in_the_vectors_is_a_seed_of_its_name() {
    assert_seeds("router", requests());
}

#[test]
fn every_named_frame_is_a_seed_of_its_name() {
    assert_seeds("classify", named::cases().into_iter().map(|case| (case.name.into(), case.frame)).collect());
}

#[test]
fn every_corpus_keeps_its_laws() {
    let _alone = alone();
    for (target, law, _) in TARGETS {
        let corpus = corpus(target);
        assert!(corpus.len() >= 10, "{} seeds for {target}", corpus.len());
        for (name, input) in corpus {
            eprintln!("{target}/{name}");
            within_memory(law, &input);
        }
    }
}

#[test]
fn mutated_seeds_keep_the_laws() {
    let _alone = alone();
    const MOST_MUTATIONS: usize = 6;
    let mut random = fastrand::Rng::with_seed(seed());
    for (target, law, rounds) in TARGETS {
        let corpus: Vec<_> = corpus(target).into_values().collect();
        for _ in 0..rounds {
            let mut input = corpus[random.usize(..corpus.len())].clone();
            for _ in 0..random.usize(1..=MOST_MUTATIONS) {
                mutate(&mut random, &mut input, &corpus);
            }
            let kept = std::panic::catch_unwind(|| within_memory(law, &input));
            assert!(kept.is_ok(), "a law of {target} is broken by {}", input.escape_ascii());
        }
    }
}

/// Asserts a law, and that it allocates no more than it may.
fn within_memory(law: Law, input: &[u8]) {
    let region = Region::new(ALLOCATOR);
    law(input);
    let allocated = region.change().bytes_allocated;
    assert!(allocated <= ALLOCATED_MOST, "{allocated} bytes allocated for {} of input", input.len());
}

fn mutate(random: &mut fastrand::Rng, input: &mut Vec<u8>, corpus: &[Vec<u8>]) {
    let at = random.usize(..=input.len());
    let other = &corpus[random.usize(..corpus.len())];
    let from = random.usize(..=other.len());
    let until = random.usize(from..=other.len().min(from + 40));
    match random.u8(..8) {
        0 => input.truncate(at),
        1 => input.insert(at, random.u8(..)),
        2 => input.splice(at..at, other[from..until].iter().copied()).for_each(drop),
        3 => {
            // The head of this input and the tail of another.
            input.truncate(at);
            input.extend(&other[from..]);
        }
        4 => input.splice(at..at, std::iter::repeat_n(random.u8(..), random.usize(..64))).for_each(drop),
        5 => {
            // The same, without a shift.
            input.truncate(at);
            input.extend(other.get(at..).unwrap_or_default());
        }
        6 => drop(input.drain(at..input.len().min(at + random.usize(..16)))),
        _ => {
            if let Some(byte) = input.get_mut(at) {
                *byte ^= 1 << random.u8(..8);
            }
        }
    }
}
