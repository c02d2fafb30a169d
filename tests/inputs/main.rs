//! What others write keeps its laws, and costs memory and steps in proportion to its length.
//!
//! Costs are counted, not timed, by an allocator that counts what all threads allocate. So each test runs alone.

mod fuzz_regressions;
#[cfg(feature = "cluster")]
mod input_costs;

use std::alloc::System;
use std::sync::{Mutex, MutexGuard, PoisonError};

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Lets one test allocate at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
