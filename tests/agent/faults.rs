//! Faults of the node at each point of a VM's life: a full disk, no descriptors, a stopped agent, damaged files, a clock
//! that jumps.
//!
//! The law after each: nothing that was acknowledged is lost, nothing is served to another guest, and everything comes
//! back by itself or the agent says what to do.
//!
//! A run tries some cells of the table, chosen by the seed; with `XDP_IMDS_FAULTS=all` it tries each. A line per cell
//! says what was tried. `XDP_IMDS_FAULTS=FAULT/POINT` tries one.

mod clock;
mod damage;
mod fault;
mod life;
mod node;

use std::time::Instant;

use support::privileged;
use support::seed::seed;

use damage::{Damage, Moment, damage_at};
use fault::Fault;
use life::{Life, Point};
use node::Node;

/// Which cells to try: `all`, or the name of one. Without it, [`CELLS`] of them.
const CHOICE: &str = "XDP_IMDS_FAULTS";
/// Cells of one table that a run tries without [`CHOICE`].
const CELLS: usize = 4;

/// The cells to try, by name.
fn chosen<T>(cells: Vec<(String, T)>) -> Vec<(String, T)> {
    let choice = std::env::var(CHOICE).unwrap_or_default();
    if choice == "all" {
        return cells;
    }
    if !choice.is_empty() {
        return cells.into_iter().filter(|(name, _)| *name == choice).collect();
    }
    let mut cells = cells;
    fastrand::Rng::with_seed(seed()).shuffle(&mut cells);
    cells.truncate(CELLS);
    cells
}

/// Tries each cell, and fails at the end with the names of those that break the law.
fn try_each<T>(cells: Vec<(String, T)>, run: impl Fn(T) -> anyhow::Result<()>) {
    let mut broken = Vec::new();
    for (name, cell) in chosen(cells) {
        let begun = Instant::now();
        let result = run(cell);
        eprintln!(
            "{name}: {} in {:.1} s",
            if result.is_ok() { "held" } else { "BROKEN" },
            begun.elapsed().as_secs_f32()
        );
        if let Err(error) = result {
            broken.push(format!("{name}: {error:#}"));
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n\n"));
}

#[test]
fn faults_of_the_node_lose_nothing_acknowledged_and_pass() {
    if !privileged::or_skip() {
        return;
    }
    let cells = Fault::ALL.into_iter().flat_map(|fault| Point::ALL.map(|point| (fault, point)));
    let named = cells.map(|(fault, point)| (format!("{fault:?}/{point:?}"), (fault, point))).collect();
    try_each(named, |(fault, point)| {
        let node = Node::new()?;
        let mut life = Life::begin(&node)?;
        life.meet(fault, point)?;
        life.assert_law()
    });
}

#[test]
fn damaged_files_cost_no_other_guest_anything_and_are_named() {
    if !privileged::or_skip() {
        return;
    }
    let cells = Damage::ALL.into_iter().flat_map(|damage| Moment::ALL.map(|moment| (damage, moment)));
    let named = cells.map(|(damage, moment)| (format!("{damage:?}/{moment:?}"), (damage, moment))).collect();
    try_each(named, |(damage, moment)| damage_at(&Node::new()?, damage, moment));
}
