//! The node's clock jumps. The agent reads it in three places, and each gets the time as a number: tokens, the age of
//! keys, and requests. A test cannot change the clock of the machine, so these are given the steps.

use std::time::Duration;

use metadata_content::token::{CLOCK_BACK_SECONDS, Keyring, TokenKeys, TokenKind};
use metadata_state::token_file;
use support::seed::seed;

const VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
const NOW: u64 = 1_790_000_000;
const HOUR: u64 = 3_600;
const YEAR: u64 = 365 * 86_400;
const MONTH: Duration = Duration::from_secs(30 * 86_400);
const KINDS: [TokenKind; 3] = [TokenKind::Aws, TokenKind::AliYun, TokenKind::Akamai];

#[test]
fn tokens_stay_valid_over_small_steps_of_the_clock() {
    let keyring = Keyring::ephemeral();
    let mut rng = fastrand::Rng::with_seed(seed());
    for round in 0..10_000 {
        let kind = KINDS[rng.usize(..KINDS.len())];
        let ttl = kind.longest_ttl_seconds();
        let token = keyring.mint(kind, VM, ttl, NOW);
        let back = rng.u64(0..=CLOCK_BACK_SECONDS);
        let ahead = rng.u64(0..u64::from(ttl));
        for now in [NOW - back, NOW + ahead] {
            assert!(keyring.verify(kind, VM, token.as_bytes(), now), "round {round}: {kind:?} at {now}");
        }
    }
}

#[test]
fn a_token_or_key_made_while_the_clock_was_years_ahead_is_not_used_for_years() {
    let room = tempfile::tempdir().expect("a directory");
    let path = room.path().join("token.key");
    for kind in KINDS {
        let ahead = token_file::open(&path, NOW + YEAR).expect("keys");
        let token = ahead.mint(kind, VM, 600, NOW + YEAR);
        assert!(ahead.verify(kind, VM, token.as_bytes(), NOW + YEAR));
        assert!(!ahead.verify(kind, VM, token.as_bytes(), NOW), "{kind:?}: the token outlives the step");
        assert!(
            token_file::rotate_if_older(&ahead, &path, MONTH, NOW).expect("rotated"),
            "{kind:?}: the key stays"
        );
        let fresh = ahead.mint(kind, VM, 600, NOW);
        assert!(ahead.verify(kind, VM, fresh.as_bytes(), NOW), "{kind:?}: no token works after the step");
        std::fs::remove_file(&path).expect("removed");
    }
}

#[test]
fn a_former_key_is_not_accepted_for_years_after_the_clock_stepped_back() {
    let stolen = Keyring::with(TokenKeys::new(NOW));
    let keyring = Keyring::with(stolen.keys().rotated(NOW + YEAR));
    let token = stolen.mint(TokenKind::Aws, VM, 600, NOW);
    assert!(!keyring.verify(TokenKind::Aws, VM, token.as_bytes(), NOW), "the former key is accepted");
}

#[test]
fn any_walk_of_the_clock_leaves_keys_that_work_and_rotate() {
    let room = tempfile::tempdir().expect("a directory");
    let path = room.path().join("token.key");
    let mut rng = fastrand::Rng::with_seed(seed());
    let mut now = NOW;
    let keyring = token_file::open(&path, now).expect("keys");
    for step in 0..400 {
        let by = match rng.u8(..4) {
            0 => rng.u64(..10),
            1 => rng.u64(..HOUR),
            2 => rng.u64(..MONTH.as_secs() * 2),
            _ => rng.u64(..20 * YEAR),
        };
        now = if rng.bool() { now.saturating_add(by) } else { now.saturating_sub(by) };
        token_file::rotate_if_older(&keyring, &path, MONTH, now)
            .unwrap_or_else(|error| panic!("step {step}: {error}"));
        assert!(!keyring.keys().older_than(MONTH, now), "step {step}: an old key stays at {now}");
        let again = token_file::open(&path, now).expect("keys");
        for kind in KINDS {
            let token = keyring.mint(kind, VM, 60, now);
            assert!(keyring.verify(kind, VM, token.as_bytes(), now), "step {step}: {kind:?} at {now}");
            assert!(again.verify(kind, VM, token.as_bytes(), now), "step {step}: {kind:?} is not on disk");
        }
    }
}
