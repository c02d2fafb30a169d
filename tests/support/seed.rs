//! The seed of random tests.

/// The variable that sets the seed, to repeat a run.
pub const SEED: &str = shell::variables::SEED;

/// The seed of this run: the value of [`SEED`], or a new number. Prints it, so that a failed test's output contains it.
///
/// # Panics
/// When [`SEED`] is not a number.
#[must_use]
pub fn seed() -> u64 {
    let seed = match std::env::var(SEED) {
        Ok(text) => {
            text.parse().unwrap_or_else(|_| panic!("{SEED} is a number from 0 to 2^64-1, not `{text}`"))
        }
        Err(_) => fastrand::u64(..),
    };
    eprintln!("{SEED}={seed}");
    seed
}
