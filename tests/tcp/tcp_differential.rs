//! A guest receives the same answers from the kernel and the stack together as from the stack alone.
//!
//! Each script of connections from one guest runs twice over a link that loses, duplicates and reorders frames: with
//! and without the code that answers in the kernel. Entries of the shared table collide. Ports and
//! initial sequence numbers are reused. Some numbers are chosen so that an acknowledgement in the middle of an
//! answer looks like the end of a handshake. `PROPTEST_CASES` sets the number of scripts.

mod guest;
mod run;
mod script;

use std::cell::Cell;

use metadata_datapath::stack::NoLedger;
use proptest::prelude::*;
use proptest::test_runner::{TestError, TestRunner};
use support::kernel::{Board, Kernel};
use support::pattern::responses;

use guest::{How, Outcome};
use run::{Outcomes, World};
use script::{End, KEY, Script, any_script};

/// Number of scripts if `PROPTEST_CASES` is not set.
const CASES: u32 = 2_000;

fn runner() -> TestRunner {
    let cases = std::env::var_os("PROPTEST_CASES").map_or(CASES, |_| ProptestConfig::default().cases);
    TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() })
}

/// Asserts that each connection ended as its plan requires, with all its answers.
fn assert_whole(script: &Script, outcomes: &Outcomes) -> Result<(), TestCaseError> {
    for (plans, outcomes) in script.lanes.iter().zip(outcomes) {
        prop_assert_eq!(plans.len(), outcomes.len(), "connections begun");
        for (plan, outcome) in plans.iter().zip(outcomes) {
            let Some(Outcome { received, how }) = outcome else {
                return Err(fail(format!("{plan:?} hangs")));
            };
            let expected =
                if matches!(plan.end, End::Reboot(_) | End::Abort(_)) { How::Left } else { How::Closed };
            prop_assert_eq!(*how, expected, "{:?}", plan);
            prop_assert!(
                expected == How::Left || responses(received, &[]).len() == plan.requests,
                "{:?}",
                plan
            );
        }
    }
    Ok(())
}

/// Status and body of all answers, without their dates.
fn bodies(outcomes: &Outcomes) -> Vec<(u16, Vec<u8>)> {
    let received = outcomes.iter().flatten().flatten().map(|outcome| &outcome.received);
    received
        .flat_map(|received| responses(received, &[]))
        .map(|answer| (answer.status, answer.body))
        .collect()
}

fn fail(reason: String) -> TestCaseError {
    TestCaseError::fail(reason)
}

/// Runs a script with and without the kernel. Returns how many SYNs, acknowledgements and FINs the kernel took.
fn compare(script: &Script, kernel: impl Fn(Board) -> Kernel) -> Result<[u64; 3], TestCaseError> {
    let (alone, left) = World::new(script, NoLedger, None).run();
    assert_whole(script, &alone).map_err(|error| fail(format!("the stack alone: {error}")))?;
    prop_assert_eq!(left, 0, "the stack alone keeps connections");
    let board = Board::new(script.places);
    let mut world = World::new(script, board.clone(), Some(kernel(board.clone())));
    let (both, left) = world.run();
    assert_whole(script, &both).map_err(|error| fail(format!("with the kernel: {error}")))?;
    prop_assert!(bodies(&alone) == bodies(&both), "the guest receives something else with the kernel");
    prop_assert_eq!((left, board.held(), board.entries().len()), (0, 0, 0), "connections are kept");
    Ok(world.kernel.map(|kernel| kernel.taken).unwrap_or_default())
}

#[test]
fn a_guest_receives_the_same_with_and_without_the_kernels_answers() {
    let taken = Cell::new([0; 3]);
    let outcome = runner().run(&any_script(), |script| {
        let more = compare(&script, |board| Kernel::new(board, KEY))?;
        let sum = taken.get();
        taken.set(std::array::from_fn(|kind| sum[kind] + more[kind]));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    println!("the kernel answered {:?} SYNs, acknowledgements and FINs", taken.get());
    assert!(taken.get().iter().all(|taken| *taken > 100), "the kernel has work: {:?}", taken.get());
}

#[test]
fn the_comparison_detects_a_kernel_that_ignores_held_connections() {
    let outcome = runner().run(&any_script(), |script| {
        let careless = |board| {
            let mut kernel = Kernel::new(board, KEY);
            kernel.ignores_held = true;
            kernel
        };
        compare(&script, careless).map(drop)
    });
    assert!(matches!(outcome, Err(TestError::Fail(..))), "{outcome:?}");
}
