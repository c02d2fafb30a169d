use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use metadata_content::token::{Keyring, SHORTEST_ROTATION, TokenKind};

use super::{TokenKeyError, TokenKeys, follow, generate, given, private_file, rotate_if_older};

const VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
const KINDS: [TokenKind; 3] = [TokenKind::Aws, TokenKind::AliYun, TokenKind::Akamai];
const NOW: u64 = 1_790_000_000;
const MONTH: Duration = Duration::from_secs(30 * 86_400);

fn room() -> (tempfile::TempDir, PathBuf) {
    let room = tempfile::tempdir().expect("a directory");
    let path = room.path().join("token-keys");
    (room, path)
}

fn open(path: &std::path::Path) -> Keyring {
    super::open(path, NOW).expect("keys")
}

#[test]
fn tokens_survive_a_restart() {
    let (_room, path) = room();
    let token = open(&path).mint(TokenKind::Aws, VM, 60, NOW);
    assert!(open(&path).verify(TokenKind::Aws, VM, token.as_bytes(), NOW));
    assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o7777, 0o600);
}

#[test]
fn formats_of_every_release_are_read() {
    let (_room, path) = room();
    let text = r#"{"form":"xdp-imds token keys 1","since_unix":1789999000,"current":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=","previous":"ICECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}"#;
    let keys = TokenKeys::parse(text.as_bytes()).expect("keys");
    golden::check("token.key", TokenKeys::VERSION, keys.text().as_bytes());
    let token = Keyring::with(keys).mint(TokenKind::Aws, VM, 60, NOW);
    for sample in golden::all("token.key") {
        private_file::replace(&path, &sample.bytes).expect("written");
        assert!(open(&path).verify(TokenKind::Aws, VM, token.as_bytes(), NOW), "{}", sample.release);
    }
}

#[test]
fn keys_of_a_later_version_are_refused_with_a_remedy_and_stay() {
    let (_room, path) = room();
    let text = br#"{"form":"xdp-imds token keys 2","keys":[{"bytes":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}]}"#;
    private_file::replace(&path, text).expect("written");
    let errors = [
        super::open(&path, NOW).err(),
        super::check_own(&path).err(),
        rotate_if_older(&Keyring::ephemeral(), &path, MONTH, NOW).err(),
    ];
    for error in errors {
        let error = error.expect("a refusal").to_string();
        for part in ["version 1 at", "found version 2", "start a release that reads it", "remove it"] {
            assert!(error.contains(part) && !error.contains("AAEC"), "no `{part}` in: {error}");
        }
    }
    assert_eq!(fs::read(&path).expect("it is there"), text);
}

#[test]
fn a_file_that_an_earlier_agent_wrote_is_read() {
    let (_room, path) = room();
    let text = r#"{"form":"xdp-imds token keys 1","since_unix":1789999000,"current":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=","previous":null}"#;
    fs::write(&path, text).expect("written");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("a mode");
    let token = b"AQEAAAAAarE7vAAAAAAAAAAAOLqMUFJbwcaBYIQywBlo5ubXQ+f+9QUU";
    assert!(open(&path).verify(TokenKind::Aws, VM, token, NOW));
    assert_eq!(fs::read_to_string(&path).expect("read"), text, "the file has changed");
}

#[test]
fn a_former_key_is_accepted_for_the_longest_token_life_across_restarts() {
    let (_room, path) = room();
    let keyring = open(&path);
    let later = NOW + MONTH.as_secs();
    let end_of_month = |kind| (kind, keyring.mint(kind, VM, 86_400, later));
    let tokens = KINDS.map(end_of_month);
    assert!(!rotate_if_older(&keyring, &path, MONTH, later - 1).expect("not yet due"));
    assert!(rotate_if_older(&keyring, &path, MONTH, later).expect("due"));
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
fn a_former_key_is_refused_after_the_overlap() {
    let (_room, path) = room();
    let keyring = open(&path);
    let rotated = NOW + MONTH.as_secs();
    let end = rotated + u64::from(TokenKind::Aws.longest_ttl_seconds());
    // An attacker with the former key signs a token that is valid long after the key's end.
    let stolen = keyring.mint(TokenKind::Aws, VM, 21_600, end);
    assert!(rotate_if_older(&keyring, &path, MONTH, rotated).expect("due"));
    assert!(keyring.verify(TokenKind::Aws, VM, stolen.as_bytes(), end - 1));
    assert!(!keyring.verify(TokenKind::Aws, VM, stolen.as_bytes(), end));
}

#[test]
fn a_second_rotation_waits_until_no_token_of_the_first_key_can_live() {
    let (_room, path) = room();
    let keyring = open(&path);
    let day = SHORTEST_ROTATION.as_secs();
    assert!(!rotate_if_older(&keyring, &path, Duration::ZERO, NOW + day - 1).expect("not yet due"));
    assert!(rotate_if_older(&keyring, &path, Duration::ZERO, NOW + day).expect("due"));
}

#[test]
fn an_agent_takes_over_the_key_another_one_began() {
    let (_room, path) = room();
    let (one, other) = (open(&path), open(&path));
    let later = NOW + MONTH.as_secs();
    assert!(rotate_if_older(&one, &path, MONTH, later).expect("due"));
    assert!(!rotate_if_older(&other, &path, MONTH, later).expect("done by the other"));
    let token = one.mint(TokenKind::Aws, VM, 60, later);
    assert!(other.verify(TokenKind::Aws, VM, token.as_bytes(), later));
}

#[test]
fn a_removed_key_file_ends_all_tokens() {
    let (_room, path) = room();
    let keyring = open(&path);
    let token = keyring.mint(TokenKind::Aws, VM, 60, NOW);
    fs::remove_file(&path).expect("removed");
    assert!(rotate_if_older(&keyring, &path, MONTH, NOW).expect("made again"));
    assert!(!keyring.verify(TokenKind::Aws, VM, token.as_bytes(), NOW));
}

#[test]
fn a_key_file_open_to_others_is_refused_with_the_remedy() {
    let (_room, path) = room();
    drop(open(&path));
    for mode in [0o640, 0o604, 0o620, 0o666] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("changed");
        let error = super::open(&path, NOW).expect_err("open to others");
        assert!(matches!(error, TokenKeyError::Exposed { mode: found, .. } if found == mode), "{error}");
        assert!(error.to_string().contains("chmod 0600"), "{error}");
    }
}

#[test]
fn no_remedy_of_a_file_that_somebody_keeps_is_to_remove_it() {
    let (_room, path) = room();
    let later = r#"{"form":"xdp-imds token keys 2","keys":[]}"#;
    for (text, mode) in [("{}", 0o640), ("hunter2", 0o600), (later, 0o600)] {
        private_file::replace(&path, text.as_bytes()).expect("written");
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("changed");
        for error in [given(&path).err(), generate(Some(&path), NOW).err()] {
            let error = error.expect("a refusal").to_string();
            assert!(!error.contains("remove") && error.contains("; "), "{error}");
        }
    }
}

/// Texts that are no key file, each made of a good one.
fn damaged(good: &str) -> [(&'static str, String); 7] {
    [
        ("empty", String::new()),
        ("cut", good[..good.len() - 2].to_owned()),
        ("another form", good.replace("token keys 1", "session keys 1")),
        ("no version", good.replace("token keys 1", "token keys one")),
        ("a short key", good.replacen("\"current\":\"", "\"current\":\"AAAA", 1)),
        ("an unknown field", good.replacen('{', "{\"more\":1,", 1)),
        ("endless", " ".repeat(10_000) + good),
    ]
}

/// The files that were set aside, the last one first.
fn set_aside(path: &std::path::Path) -> Vec<String> {
    let texts = (1..).map_while(|n| fs::read_to_string(super::numbered(path, n)).ok());
    texts.collect()
}

#[test]
fn a_damaged_key_file_is_set_aside_and_a_new_key_made() {
    let (room, path) = room();
    drop(open(&path));
    let good = fs::read_to_string(&path).expect("read");
    let mut last = Vec::new();
    for (case, text) in damaged(&good) {
        fs::write(&path, &text).expect("written");
        let token = open(&path).mint(TokenKind::Aws, VM, 60, NOW);
        assert!(
            open(&path).verify(TokenKind::Aws, VM, token.as_bytes(), NOW),
            "{case}: the new key is not on disk"
        );
        last.insert(0, text);
        last.truncate(super::ASIDE_MOST);
        assert_eq!(set_aside(&path), last, "{case}");
        for file in fs::read_dir(room.path()).expect("listed") {
            let mode = file.expect("a file").metadata().expect("there").permissions().mode() & 0o7777;
            assert_eq!(mode, 0o600, "{case}");
        }
    }
}

#[test]
fn a_key_file_damaged_while_an_agent_runs_is_restored_and_tokens_stay_valid() {
    let (_room, path) = room();
    let keyring = open(&path);
    let token = keyring.mint(TokenKind::Aws, VM, 3_600, NOW);
    let good = fs::read_to_string(&path).expect("read");
    for (case, text) in damaged(&good) {
        fs::write(&path, &text).expect("written");
        assert!(!rotate_if_older(&keyring, &path, MONTH, NOW).expect("restored"), "{case}");
        assert_eq!(fs::read_to_string(&path).expect("read"), good, "{case}");
        assert!(open(&path).verify(TokenKind::Aws, VM, token.as_bytes(), NOW), "{case}");
        assert_eq!(set_aside(&path)[0], text, "{case}");
    }
}

#[test]
fn a_damaged_file_that_the_operator_maintains_is_refused_and_left_alone() {
    let (_room, path) = room();
    drop(open(&path));
    let good = fs::read_to_string(&path).expect("read");
    for (case, text) in damaged(&good) {
        fs::write(&path, &text).expect("written");
        for error in [given(&path).err(), follow(&Keyring::ephemeral(), &path).err()] {
            let error = error.expect(case);
            assert!(matches!(error, TokenKeyError::Malformed { .. }), "{case}: {error}");
        }
        assert_eq!(fs::read_to_string(&path).expect("read"), text, "{case}");
    }
}

#[test]
fn agents_with_a_shared_key_file_accept_each_others_tokens_and_its_next_key() {
    let (_room, path) = room();
    assert!(given(&path).expect("no file is no error").is_none());
    let give = |text: &str| {
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, Permissions::from_mode(0o400)).expect("a mode");
    };
    give(&generate(None, NOW).expect("a key"));
    let [here, there] = [0, 1].map(|_| given(&path).expect("a key file").expect("keys"));
    let token = here.mint(TokenKind::Aws, VM, 3_600, NOW);
    assert!(there.verify(TokenKind::Aws, VM, token.as_bytes(), NOW));
    let next = generate(Some(&path), NOW).expect("a key after the other");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("a mode");
    give(&next);
    assert!(follow(&there, &path).expect("the next key"));
    assert!(there.verify(TokenKind::Aws, VM, token.as_bytes(), NOW), "a token of the former key");
    let newer = there.mint(TokenKind::Aws, VM, 3_600, NOW);
    assert!(!here.verify(TokenKind::Aws, VM, newer.as_bytes(), NOW), "the key is another");
    fs::remove_file(&path).expect("removed");
    assert!(!follow(&there, &path).expect("it stays unchanged"));
    assert!(there.verify(TokenKind::Aws, VM, newer.as_bytes(), NOW));
}
