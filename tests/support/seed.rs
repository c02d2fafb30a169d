//! Randomness with a seed you can type.

/// The variable that repeats a run.
pub const SEED: &str = shell::variables::SEED;

/// The seed of this run: from [`SEED`], or a new one; printed either way, so that a failure names it.
///
/// # Panics
/// When [`SEED`] is set to something that is no number.
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
