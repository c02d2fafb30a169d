use std::io::Cursor;

use super::{FileHeader, FormError, StateFileKind, WriteResult};

const FORM: StateFileKind = StateFileKind { kind: "numbers", version: 3, oldest: 2, bytes: 1 << 10 };

fn encode(form: StateFileKind, entries: usize) -> (Vec<u8>, WriteResult) {
    let mut bytes = Vec::new();
    let entries = (0..entries).map(|n| Ok(format!("{{\"n\":{n}}}").into_bytes()));
    let written = form.write(entries, &mut bytes).expect("memory takes it");
    (bytes, written)
}

fn decode(form: StateFileKind, bytes: &[u8]) -> Result<Vec<String>, FormError> {
    let mut found = Vec::new();
    form.read(Cursor::new(bytes), |line| {
        found.push(String::from_utf8_lossy(line).trim_end().to_owned());
        Ok(())
    })?;
    Ok(found)
}

#[test]
fn a_file_of_entries_has_the_lines_that_every_version_reads() {
    let (bytes, written) = encode(FORM, 2);
    assert_eq!(written, WriteResult { records: 2, left_out: 0 });
    let text = String::from_utf8(bytes.clone()).expect("text");
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[..3], [r#"{"xdp-imds":"numbers","version":3}"#, r#"{"n":0}"#, r#"{"n":1}"#]);
    assert!(lines[3].starts_with(r#"{"records":2,"sha256":""#), "{text}");
    assert_eq!(decode(FORM, &bytes).expect("whole"), lines[1..3]);
}

#[test]
fn entries_beyond_the_limit_are_left_out_and_counted() {
    let (bytes, written) = encode(FORM, 200);
    assert!(bytes.len() <= FORM.bytes && written.left_out > 0, "{written:?}");
    assert_eq!(written.records + written.left_out, 200);
    assert_eq!(decode(FORM, &bytes).expect("whole").len(), written.records);
}

#[test]
fn a_file_of_another_kind_or_size_is_damaged() {
    let (bytes, _) = encode(FORM, 4);
    let smaller = StateFileKind { bytes: bytes.len() - 1, ..FORM };
    for other in [StateFileKind { kind: "letters", ..FORM }, smaller] {
        let error = decode(other, &bytes).expect_err("another form");
        assert!(matches!(error, FormError::Damaged(_)), "{other:?}: {error}");
    }
}

#[test]
fn versions_within_the_range_are_read_and_the_error_for_others_names_both_and_the_remedy() {
    for (written, is_read) in [(1, false), (2, true), (3, true), (4, false)] {
        let (bytes, _) = encode(StateFileKind { version: written, ..FORM }, 2);
        match decode(FORM, &bytes) {
            Ok(lines) => assert!(is_read && lines.len() == 2, "{written}"),
            Err(FormError::Version(error)) => {
                let (found, text) = (format!("found version {written}"), error.to_string());
                let parts = ["numbers of version 2 to 3", &found, "start a release that reads it"];
                assert!(!is_read && parts.iter().all(|part| text.contains(part)), "{text}");
            }
            Err(error) => panic!("{written}: {error}"),
        }
    }
}

#[test]
fn a_write_spares_a_file_of_another_version_only() {
    let room = tempfile::tempdir().expect("a directory");
    let path = room.path().join("numbers");
    FORM.spare_other_version(&path).expect("there is no file");
    for (version, kept) in [(2, None), (3, None), (4, Some("numbers.v4")), (1, Some("numbers.v1"))] {
        let (bytes, _) = encode(StateFileKind { version, ..FORM }, 2);
        std::fs::write(&path, &bytes).expect("a file");
        FORM.spare_other_version(&path).expect("no error");
        assert_eq!(path.exists(), kept.is_none(), "{version}");
        if let Some(kept) = kept {
            assert_eq!(std::fs::read(room.path().join(kept)).expect("it is kept"), bytes);
        }
    }
}

#[test]
fn the_fields_of_a_head_are_found_beside_others() {
    let head: FileHeader =
        serde_json::from_str(r#"{"xdp-imds":"numbers","version":3,"n":1}"#).expect("a head");
    assert_eq!(head, FORM.head());
}
