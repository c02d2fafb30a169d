//! The steering policy keeps its laws on every seed of the fuzz corpus and on mutated seeds.

#[path = "fuzz/laws/classify.rs"]
mod laws;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use support::{frames, seed};

const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/classify");

/// If set to 1, the test writes the seeds of the named frames before it compares them.
const WRITE: &str = "XDP_IMDS_WRITE_SEEDS";

fn corpus() -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(CORPUS).expect("the corpus is in the tree");
    let seed = |file: std::io::Result<fs::DirEntry>| {
        let file = file.expect("a readable directory");
        let name = file.file_name().into_string().expect("a plain name");
        (name, fs::read(file.path()).expect("a readable seed"))
    };
    files.map(seed).collect()
}

#[test]
fn every_named_frame_is_a_seed_of_its_name() {
    if std::env::var_os(WRITE).is_some_and(|value| value == "1") {
        fs::create_dir_all(CORPUS).expect("a place for the corpus");
        for case in frames::cases() {
            fs::write(Path::new(CORPUS).join(case.name), case.frame).expect("a seed is written");
        }
    }
    let corpus = corpus();
    for case in frames::cases() {
        let seed = corpus.get(case.name);
        assert_eq!(seed, Some(&case.frame), "{}: {WRITE}=1 rewrites the seeds", case.name);
    }
}

#[test]
fn the_corpus_keeps_the_laws() {
    let corpus = corpus();
    assert!(corpus.len() >= frames::cases().len(), "{} seeds", corpus.len());
    for (name, frame) in corpus {
        eprintln!("{name}");
        laws::assert_all(&frame);
    }
}

#[test]
fn mutated_seeds_keep_the_laws() {
    const ROUNDS: usize = 200_000;
    const MOST_MUTATIONS: usize = 6;
    let mut random = fastrand::Rng::with_seed(seed::seed());
    let corpus: Vec<_> = corpus().into_values().collect();
    for _ in 0..ROUNDS {
        let mut frame = corpus[random.usize(..corpus.len())].clone();
        for _ in 0..random.usize(1..=MOST_MUTATIONS) {
            mutate(&mut random, &mut frame, &corpus);
        }
        let shown = frame.clone();
        let kept = std::panic::catch_unwind(|| laws::assert_all(&frame));
        assert!(kept.is_ok(), "a law is broken by {shown:02x?}");
    }
}

fn mutate(random: &mut fastrand::Rng, frame: &mut Vec<u8>, corpus: &[Vec<u8>]) {
    let at = random.usize(..=frame.len());
    match random.u8(..6) {
        0 => frame.truncate(at),
        1 => frame.insert(at, random.u8(..)),
        2 => frame.splice(at..at, frames::SERVED_V4.octets()).for_each(drop),
        3 => {
            // The head of this frame and the tail of another.
            let other = &corpus[random.usize(..corpus.len())];
            frame.truncate(at);
            frame.extend(other.get(at..).unwrap_or_default());
        }
        4 => frame.extend(std::iter::repeat_n(random.u8(..), random.usize(..64))),
        _ => {
            if let Some(byte) = frame.get_mut(at) {
                *byte ^= 1 << random.u8(..8);
            }
        }
    }
}
