//! What others write costs what it weighs: no text of a record, a VM's configuration, a domain, a VMI or a guest's
//! request makes a parser or a translator take more memory or more steps than a multiple of its length and a constant.
//!
//! The table in `input_costs/targets.rs` has one row for each parser, with its multiple and its constant. Steps are
//! counted, not timed: all bytes that are ever allocated, and the allocations. What is allocated in all is also at least
//! the peak.
//!
//! A run tries each shape of `input_costs/hostile.rs` at each parser, then random texts. With `XDP_IMDS_INPUTS` it
//! tries so many of them: `XDP_IMDS_INPUTS=5000000 cargo test -p xdp-imds-tests --test inputs input_costs -- --nocapture`.

mod hostile;
mod targets;

use std::fs;
use std::path::PathBuf;
use std::sync::MutexGuard;

use fastrand::Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use stats_alloc::Region;
use support::seed;

use super::ALLOCATOR;
use hostile::{OTHERS, SHAPES, Shape};
use targets::{TARGETS, Target};

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
            0 => hostile::words(&mut random, length),
            _ => {
                let text = all[random.usize(..all.len())].1(length);
                hostile::mutate(&mut random, &text)
            }
        };
        assert_law(target, "random", &text);
        if number % 100_000 == 99_999 {
            eprintln!("{} inputs", number + 1);
        }
    }
}
