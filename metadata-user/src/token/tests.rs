use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;

use super::{KeyError, Keyring, Kind, SHORTEST_ROTATION, TOKEN_CHARS};

const VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
const OTHER_VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3e";
const KINDS: [Kind; 3] = [Kind::Aws, Kind::AliYun, Kind::Akamai];
const NOW: u64 = 1_790_000_000;
const MONTH: Duration = Duration::from_secs(30 * 86_400);

fn room() -> (tempfile::TempDir, PathBuf) {
    let room = tempfile::tempdir().expect("a directory");
    let path = room.path().join("token-keys");
    (room, path)
}

fn open(path: &std::path::Path) -> Keyring {
    Keyring::open(path, NOW).expect("keys")
}

#[test]
fn a_token_has_the_form_that_is_written_down() {
    let token = Keyring::ephemeral().mint(Kind::AliYun, VM, 60, NOW);
    assert_eq!(token.len(), TOKEN_CHARS);
    let octets = STANDARD.decode(&token).expect("base64");
    assert_eq!(octets.len(), 42);
    assert_eq!(octets[..2], [1, 2]);
    assert_eq!(octets[2..10], (NOW + 60).to_be_bytes());
    assert!(token.bytes().all(|b| b.is_ascii_graphic()));
}

#[test]
fn a_token_made_elsewhere_by_the_written_form_is_taken() {
    // Made with Python's hmac: the key is the octets 0 to 31, the nonce 1 to 8, the end NOW + 60.
    const KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    const TOKEN: &[u8; TOKEN_CHARS] = b"AQMAAAAAarE7vAECAwQFBgcICNh7cL9xTgVOVBvj7TiD6OBCKx0GG7SZ";
    let (_room, path) = room();
    let text =
        format!(r#"{{"form":"xdp-imds token keys 1","since_unix":{NOW},"current":"{KEY}","previous":null}}"#);
    fs::write(&path, text).expect("written");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("changed");
    let keyring = open(&path);
    assert!(keyring.verify(Kind::Akamai, VM, TOKEN, NOW + 59));
    assert!(!keyring.verify(Kind::Akamai, VM, TOKEN, NOW + 60));
}

#[test]
fn no_two_tokens_are_alike() {
    let keyring = Keyring::ephemeral();
    let tokens: std::collections::HashSet<_> =
        (0..1_000).map(|_| keyring.mint(Kind::Aws, VM, 60, NOW)).collect();
    assert_eq!(tokens.len(), 1_000);
}

#[test]
fn no_token_outlives_the_longest_life_of_its_kind() {
    let keyring = Keyring::ephemeral();
    for kind in KINDS {
        let token = keyring.mint(kind, VM, u32::MAX, NOW);
        let end = NOW + u64::from(kind.longest_ttl_seconds());
        assert!(keyring.verify(kind, VM, token.as_bytes(), end - 1), "{kind:?}");
        assert!(!keyring.verify(kind, VM, token.as_bytes(), end), "{kind:?}");
    }
}

#[test]
fn anything_but_a_token_is_refused() {
    let keyring = Keyring::ephemeral();
    let token = keyring.mint(Kind::Aws, VM, 60, NOW);
    let zeros = "A".repeat(TOKEN_CHARS);
    let longer = format!("{token}\n");
    for wrong in ["", &token[1..], &token[..55], &longer, &zeros, &"é".repeat(28)] {
        assert!(!keyring.verify(Kind::Aws, VM, wrong.as_bytes(), NOW), "{wrong:?}");
    }
    assert!(!Keyring::ephemeral().verify(Kind::Aws, VM, token.as_bytes(), NOW), "a key of its own");
}

proptest! {
    #[test]
    fn a_token_holds_for_its_vm_and_kind_until_it_ends(
        kind in 0_usize..3, other in 1_usize..3, ttl in 1_u32..=21_600, now in 0_u64..1 << 40, late in 0_u64..1 << 40,
    ) {
        let keyring = Keyring::ephemeral();
        let (kind, other) = (KINDS[kind], KINDS[(kind + other) % 3]);
        let token = keyring.mint(kind, VM, ttl, now);
        let end = now + u64::from(ttl);
        prop_assert!(keyring.verify(kind, VM, token.as_bytes(), now));
        prop_assert!(keyring.verify(kind, VM, token.as_bytes(), end - 1));
        prop_assert!(!keyring.verify(kind, VM, token.as_bytes(), end + late));
        prop_assert!(!keyring.verify(other, VM, token.as_bytes(), now));
        prop_assert!(!keyring.verify(kind, OTHER_VM, token.as_bytes(), now));
    }

    #[test]
    fn every_flipped_bit_is_refused(kind in 0_usize..3, ttl in 1_u32..=21_600) {
        let keyring = Keyring::ephemeral();
        let kind = KINDS[kind];
        let token = keyring.mint(kind, VM, ttl, NOW).into_bytes();
        for bit in 0..token.len() * 8 {
            let mut flipped = token.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!keyring.verify(kind, VM, &flipped, NOW), "bit {bit} of the text");
        }
        let octets = STANDARD.decode(&token).expect("base64");
        for bit in 0..octets.len() * 8 {
            let mut flipped = octets.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!keyring.verify(kind, VM, STANDARD.encode(flipped).as_bytes(), NOW), "bit {bit}");
        }
    }
}

#[test]
fn tokens_survive_a_restart() {
    let (_room, path) = room();
    let token = open(&path).mint(Kind::Aws, VM, 60, NOW);
    assert!(open(&path).verify(Kind::Aws, VM, token.as_bytes(), NOW));
    assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o7777, 0o600);
}

#[test]
fn a_former_key_counts_for_one_longest_life_also_across_a_restart() {
    let (_room, path) = room();
    let keyring = open(&path);
    let later = NOW + MONTH.as_secs();
    let end_of_month = |kind| (kind, keyring.mint(kind, VM, 86_400, later));
    let tokens = KINDS.map(end_of_month);
    assert!(!keyring.rotate_if_older(&path, MONTH, later - 1).expect("not yet due"));
    assert!(keyring.rotate_if_older(&path, MONTH, later).expect("due"));
    let reopened = open(&path);
    for (kind, token) in &tokens {
        let end = later + u64::from(kind.longest_ttl_seconds());
        for ring in [&keyring, &reopened] {
            assert!(ring.verify(*kind, VM, token.as_bytes(), end - 1), "{kind:?}");
            assert!(!ring.verify(*kind, VM, token.as_bytes(), end), "{kind:?}");
            let fresh = ring.mint(*kind, VM, 60, later);
            assert!(keyring.verify(*kind, VM, fresh.as_bytes(), later), "{kind:?}");
        }
    }
}

#[test]
fn a_former_key_is_worth_nothing_after_the_overlap() {
    let (_room, path) = room();
    let keyring = open(&path);
    let rotated = NOW + MONTH.as_secs();
    let end = rotated + u64::from(Kind::Aws.longest_ttl_seconds());
    // As one who learnt the former key would: signed with it, good for long after it was given up.
    let stolen = keyring.mint(Kind::Aws, VM, 21_600, end);
    assert!(keyring.rotate_if_older(&path, MONTH, rotated).expect("due"));
    assert!(keyring.verify(Kind::Aws, VM, stolen.as_bytes(), end - 1));
    assert!(!keyring.verify(Kind::Aws, VM, stolen.as_bytes(), end));
}

#[test]
fn a_second_rotation_waits_until_no_token_of_the_first_key_can_live() {
    let (_room, path) = room();
    let keyring = open(&path);
    let day = SHORTEST_ROTATION.as_secs();
    assert!(!keyring.rotate_if_older(&path, Duration::ZERO, NOW + day - 1).expect("not yet due"));
    assert!(keyring.rotate_if_older(&path, Duration::ZERO, NOW + day).expect("due"));
}

#[test]
fn an_agent_takes_over_the_key_another_one_began() {
    let (_room, path) = room();
    let (one, other) = (open(&path), open(&path));
    let later = NOW + MONTH.as_secs();
    assert!(one.rotate_if_older(&path, MONTH, later).expect("due"));
    assert!(!other.rotate_if_older(&path, MONTH, later).expect("done by the other"));
    let token = one.mint(Kind::Aws, VM, 60, later);
    assert!(other.verify(Kind::Aws, VM, token.as_bytes(), later));
}

#[test]
fn a_removed_key_file_ends_all_tokens() {
    let (_room, path) = room();
    let keyring = open(&path);
    let token = keyring.mint(Kind::Aws, VM, 60, NOW);
    fs::remove_file(&path).expect("removed");
    assert!(keyring.rotate_if_older(&path, MONTH, NOW).expect("made anew"));
    assert!(!keyring.verify(Kind::Aws, VM, token.as_bytes(), NOW));
}

#[test]
fn a_key_file_open_to_others_is_refused_with_the_way_out() {
    let (_room, path) = room();
    drop(open(&path));
    for mode in [0o640, 0o604, 0o620, 0o666] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("changed");
        let error = Keyring::open(&path, NOW).expect_err("open to others");
        assert!(matches!(error, KeyError::Exposed { mode: found, .. } if found == mode), "{error}");
        assert!(error.to_string().contains("remove it"), "{error}");
    }
}

#[test]
fn a_malformed_key_file_is_refused_and_left_alone() {
    let (_room, path) = room();
    drop(open(&path));
    let good = fs::read_to_string(&path).expect("read");
    let cases = [
        ("empty", String::new()),
        ("cut", good[..good.len() - 2].to_owned()),
        ("another form", good.replace("keys 1", "keys 2")),
        ("a short key", good.replacen("\"current\":\"", "\"current\":\"AAAA", 1)),
        ("an unknown field", good.replacen('{', "{\"more\":1,", 1)),
        ("endless", " ".repeat(10_000) + &good),
    ];
    for (case, text) in cases {
        fs::write(&path, &text).expect("written");
        let error = Keyring::open(&path, NOW).expect_err(case);
        assert!(matches!(error, KeyError::Malformed { .. }), "{case}: {error}");
        assert_eq!(fs::read_to_string(&path).expect("read"), text, "{case}");
    }
}

#[test]
fn no_key_is_shown() {
    let (_room, path) = room();
    let keyring = open(&path);
    assert_eq!(format!("{keyring:?}"), "Keyring(…)");
}

#[test]
fn agents_with_a_file_of_others_take_each_others_tokens_and_its_next_key() {
    let (_room, path) = room();
    assert!(Keyring::given(&path).expect("no file is no error").is_none());
    let give = |text: &str| {
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, Permissions::from_mode(0o400)).expect("a mode");
    };
    give(&Keyring::generate(None, NOW).expect("a key"));
    let [here, there] = [0, 1].map(|_| Keyring::given(&path).expect("a key file").expect("keys"));
    let token = here.mint(Kind::Aws, VM, 3_600, NOW);
    assert!(there.verify(Kind::Aws, VM, token.as_bytes(), NOW));
    let next = Keyring::generate(Some(&path), NOW).expect("a key after the other");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("a mode");
    give(&next);
    there.follow(&path).expect("the next key");
    assert!(there.verify(Kind::Aws, VM, token.as_bytes(), NOW), "a token of the former key");
    let newer = there.mint(Kind::Aws, VM, 3_600, NOW);
    assert!(!here.verify(Kind::Aws, VM, newer.as_bytes(), NOW), "the key is another");
    fs::remove_file(&path).expect("removed");
    there.follow(&path).expect("it stays as it was");
    assert!(there.verify(Kind::Aws, VM, newer.as_bytes(), NOW));
}
