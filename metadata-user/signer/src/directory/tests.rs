use super::{
    Algorithm, DirectoryError, KEYS, KeyDirectory, Rotation, SigningKey, birth, how_to_make, make, name,
};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

const DAY: u64 = 86_400;
/// 2026-11-23 10:00:00 UTC.
const NOW: u64 = 1_795_428_000;

fn opened(path: &Path, after: Option<u64>) -> KeyDirectory {
    let rotation = Rotation { publish_for: DAY, after };
    KeyDirectory::new(path.to_owned(), Algorithm::Es256, rotation)
}

fn put(path: &Path, file: &str) -> String {
    let text = SigningKey::generate(Algorithm::Es256).expect("made");
    fs::write(path.join(file), &text).expect("written");
    fs::set_permissions(path.join(file), Permissions::from_mode(0o600)).expect("private");
    SigningKey::parse(Algorithm::Es256, &text).expect("a key").kid().to_owned()
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(path)
        .expect("read")
        .map(|entry| entry.expect("read").file_name().into_string().expect("text"))
        .collect();
    names.sort();
    names
}

#[test]
fn the_time_in_a_name_is_read_back() {
    assert_eq!(name(NOW), "20261123T100000Z.pem");
    for (file, expected) in [
        ("20261123T100000Z.pem", Some(NOW)),
        ("19700101T000000Z.pem", Some(0)),
        ("20261323T100000Z.pem", None),
        ("20261123T250000Z.pem", None),
        ("+0261123T100000Z.pem", None),
        ("20261123T100000.pem", None),
        ("key.pem", None),
        ("20261123T100000Z.key", None),
    ] {
        assert_eq!(birth(file), expected, "{file}");
    }
}

#[test]
fn the_newest_key_that_was_published_for_long_enough_signs() {
    let cases: [(&[u64], Option<usize>); 5] = [
        (&[], None),
        (&[NOW], Some(0)),
        (&[NOW - DAY + 1, NOW], Some(0)),
        (&[NOW - 9 * DAY, NOW - DAY, NOW - DAY + 1], Some(1)),
        (&[NOW - DAY, NOW + 400 * DAY], Some(0)),
    ];
    for (births, expected) in cases {
        let room = tempfile::tempdir().expect("a directory");
        let kids: Vec<_> = births.iter().map(|birth| put(room.path(), &name(*birth))).collect();
        let mut keys = opened(room.path(), None);
        assert!(keys.look().expect("read").is_empty());
        let found: Vec<_> = keys.keys().map(SigningKey::kid).collect();
        assert_eq!(found, kids, "every key is published");
        assert_eq!(
            keys.signing(NOW).map(SigningKey::kid),
            expected.map(|at| kids[at].as_str()),
            "{births:?}"
        );
        assert_eq!(keys.require_key().is_ok(), !births.is_empty());
    }
}

#[test]
fn unusable_files_are_skipped_with_their_reason() {
    let room = tempfile::tempdir().expect("a directory");
    let kid = put(room.path(), "good.pem");
    put(room.path(), "open.pem");
    fs::set_permissions(room.path().join("open.pem"), Permissions::from_mode(0o640)).expect("a mode");
    put(room.path(), ".hidden.pem");
    put(room.path(), "other.key");
    put(room.path(), "text.pem");
    fs::write(room.path().join("text.pem"), "no key").expect("written");
    fs::create_dir(room.path().join("dir.pem")).expect("made");
    let mut keys = opened(room.path(), None);
    let skipped: Vec<_> = keys.look().expect("read").iter().map(ToString::to_string).collect();
    assert_eq!(keys.keys().map(SigningKey::kid).collect::<Vec<_>>(), [kid]);
    assert_eq!(skipped.len(), 3, "{skipped:?}");
    for (reason, text) in skipped.iter().zip(["dir.pem", "mode 640", "text.pem"]) {
        assert!(reason.contains(text), "{reason}");
    }
    assert!(keys.look().expect("read").is_empty(), "a reason is given once");
    fs::remove_file(room.path().join("good.pem")).expect("removed");
    keys.look().expect("read");
    assert!(matches!(keys.require_key(), Err(DirectoryError::Empty { .. })));
}

#[test]
fn an_error_about_a_missing_key_says_how_to_make_one_for_the_algorithm() {
    let room = tempfile::tempdir().expect("a directory");
    put(room.path(), "es256.pem");
    for (algorithm, has_key, parts) in [
        (Algorithm::Es256, true, &[][..]),
        (
            Algorithm::Rs256,
            false,
            &["a key for RS256 in ", "openssl genpkey -algorithm RSA", "algorithm: ES256"],
        ),
        (Algorithm::EdDsa, false, &["a key for EdDSA in ", "xdp-imds identity key /", "--algorithm EdDSA"]),
    ] {
        let rotation = Rotation { publish_for: DAY, after: None };
        let mut keys = KeyDirectory::new(room.path().to_owned(), algorithm, rotation);
        keys.look().expect("read");
        let found = keys.require_key();
        assert_eq!(found.is_ok(), has_key, "{algorithm}");
        let said = found.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(parts.iter().all(|part| said.contains(part)), "{algorithm}: {said}");
    }
    let makes_es256 = how_to_make(Algorithm::Es256, room.path());
    assert!(
        makes_es256.contains("xdp-imds identity key /") && !makes_es256.contains("openssl"),
        "{makes_es256}"
    );
}

#[test]
fn too_many_keys_change_nothing() {
    let room = tempfile::tempdir().expect("a directory");
    let kid = put(room.path(), "a.pem");
    let mut keys = opened(room.path(), None);
    keys.look().expect("read");
    (0..KEYS).for_each(|n| drop(put(room.path(), &format!("b{n}.pem"))));
    assert!(matches!(keys.look(), Err(DirectoryError::TooMany { found, .. }) if found == KEYS + 1));
    assert_eq!(keys.signing(NOW).map(SigningKey::kid), Some(kid.as_str()));
}

#[test]
fn rotation_publishes_before_it_signs_and_deletes_when_the_second_successor_signs() {
    let room = tempfile::tempdir().expect("a directory");
    put(room.path(), "operator.pem");
    fs::File::open(room.path().join("operator.pem"))
        .and_then(|file| file.set_modified(std::time::UNIX_EPOCH))
        .expect("an old key");
    let mut keys = opened(room.path(), Some(30 * DAY));
    let step = |keys: &mut KeyDirectory, now| {
        keys.look().expect("read");
        let changed = keys.rotate(now).expect("rotated");
        keys.look().expect("read");
        (changed, keys.signing(now).map(|key| key.kid().to_owned()))
    };
    let (changed, first) = step(&mut keys, NOW);
    assert!(changed && keys.keys().len() == 2);
    assert_eq!(step(&mut keys, NOW + DAY - 1), (false, first.clone()), "the new key is only published");
    let (changed, second) = step(&mut keys, NOW + DAY);
    assert!(!changed && second != first, "the new key signs");
    step(&mut keys, NOW + 30 * DAY);
    step(&mut keys, NOW + 31 * DAY);
    step(&mut keys, NOW + 60 * DAY);
    let (_, third) = step(&mut keys, NOW + 61 * DAY);
    let made = |days: u64| name(NOW + days * DAY);
    assert_eq!(names(room.path()), [made(30), made(60), "operator.pem".into()], "the operator's file stays");
    // A clock that was a year ahead leaves every key that may have signed.
    step(&mut keys, NOW + 426 * DAY);
    assert_eq!(keys.signing(NOW + 61 * DAY).map(SigningKey::kid), third.as_deref());
}

#[test]
fn a_key_is_made_private_and_never_replaced() {
    let room = tempfile::tempdir().expect("a directory");
    let below = room.path().join("keys");
    let path = make(&below, Algorithm::EdDsa, NOW).expect("made");
    assert_eq!(path, below.join("20261123T100000Z.pem"));
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(&below)), (0o600, 0o700));
    let before = fs::read(&path).expect("read");
    assert!(make(&below, Algorithm::EdDsa, NOW).is_err());
    assert_eq!((fs::read(&path).expect("read"), names(&below).len()), (before, 1));
}
