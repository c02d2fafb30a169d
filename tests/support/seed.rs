//! The seed of random tests.

/// The variable that sets the seed, to repeat a run.
pub const SEED: &str = shell::variables::SEED;

/// The seed of this run: the value of [`SEED`], or a new number. Prints it, so that a failed test's output contains it.
///
/// # Panics
/// When [`SEED`] is not a number.
#[must_use]
pub fn seed() -> u64 {
    seed_or(fastrand::u64(..))
}

/// Like [`seed`], with another number instead of a new one. For tests of programs that are not ours, whose known faults
/// are listed.
///
/// # Panics
/// When [`SEED`] is not a number.
#[must_use]
pub fn seed_or(other: u64) -> u64 {
    let seed = match std::env::var(SEED) {
        Ok(text) => {
            text.parse().unwrap_or_else(|_| panic!("{SEED} is a number from 0 to 2^64-1, not `{text}`"))
        }
        Err(_) => other,
    };
    eprintln!("{SEED}={seed}");
    seed
}
