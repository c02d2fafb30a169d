use super::*;

const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";

fn mailbox() -> Mailbox {
    Mailbox::new(UUID, &Outbox::detached())
}

#[test]
fn a_password_is_posted_once_and_within_its_size() {
    let mailbox = mailbox();
    assert_eq!(mailbox.posted_password(), "");
    assert_eq!(mailbox.post_password(b""), Err(PasswordRefused::Empty));
    assert_eq!(mailbox.post_password(&[b'x'; PASSWORD_BYTES + 1]), Err(PasswordRefused::TooLarge));
    assert_eq!(mailbox.posted_password(), "", "a refused password was kept");
    let longest = [b'x'; PASSWORD_BYTES];
    assert_eq!(mailbox.post_password(&longest), Ok(()));
    assert_eq!(mailbox.post_password(b"other"), Err(PasswordRefused::AlreadySet));
    assert_eq!(mailbox.post_password(b""), Err(PasswordRefused::Empty), "the size is checked first");
    assert_eq!(mailbox.posted_password(), longest.as_slice());
}

#[test]
fn the_records_password_is_served_until_saved_and_again_after_a_change() {
    let mailbox = mailbox();
    mailbox.note_record("web", Some("first"));
    assert!(!mailbox.password_taken());
    mailbox.take_password();
    mailbox.take_password();
    assert!(mailbox.password_taken());
    mailbox.note_record("renamed", Some("first"));
    assert!(mailbox.password_taken(), "the record was rendered again with the same password");
    for changed in [Some("second"), Some("first"), None] {
        mailbox.note_record("web", changed);
        assert!(!mailbox.password_taken(), "a changed password is served again");
        mailbox.take_password();
        assert!(mailbox.password_taken());
    }
}

#[test]
fn attributes_are_listed_in_order_and_each_change_raises_the_version() {
    let mailbox = mailbox();
    assert_eq!(mailbox.attributes(), []);
    let set = |namespace, key, value: &str| mailbox.set_attribute(namespace, key, value.as_bytes());
    assert_eq!(set("hostkeys", "ssh-rsa", "AAAA"), Ok(true));
    assert_eq!(set("hostkeys", "ssh-ed25519", "BBBB"), Ok(true));
    assert_eq!(set("a:b", "k", ""), Ok(true));
    let listed = mailbox.attributes();
    let expected = [("a:b", vec!["k"]), ("hostkeys", vec!["ssh-ed25519", "ssh-rsa"])];
    assert_eq!(
        listed,
        expected.map(|(ns, keys)| (ns.to_owned(), keys.into_iter().map(String::from).collect()))
    );
    assert_eq!(mailbox.attributes_version(), 3);
    assert_eq!(set("a:b", "k", ""), Ok(false));
    assert_eq!(mailbox.attributes_version(), 3, "the same value is no change");
    assert_eq!(set("a:b", "k", "v"), Ok(true));
    assert_eq!(mailbox.attribute("a:b", "k").as_deref(), Some(b"v".as_slice()));
    assert!(mailbox.delete_attribute("a:b", "k"));
    assert!(!mailbox.delete_attribute("a:b", "k"));
    assert!(!mailbox.delete_attribute("none", "k"));
    assert_eq!(mailbox.attributes_version(), 5);
    assert_eq!(mailbox.attribute("a:b", "k"), None);
    assert_eq!(mailbox.attributes().len(), 1, "an empty namespace is not listed");
}

#[test]
fn attributes_stay_within_their_limits() {
    let mailbox = mailbox();
    let long = "n".repeat(ATTRIBUTE_NAME_CHARS);
    let longer = "n".repeat(ATTRIBUTE_NAME_CHARS + 1);
    for name in ["", "a/b", "a b", "ü", "a\n", &longer] {
        assert_eq!(mailbox.set_attribute(name, "k", b"v"), Err(AttributeRefused::Name), "{name:?}");
        assert_eq!(mailbox.set_attribute("n", name, b"v"), Err(AttributeRefused::Name), "{name:?}");
    }
    let largest = vec![b'v'; ATTRIBUTE_BYTES];
    assert_eq!(mailbox.set_attribute(&long, &long, &largest), Ok(true));
    assert_eq!(
        mailbox.set_attribute("n", "k", &[largest, vec![0]].concat()),
        Err(AttributeRefused::TooLarge)
    );
    for n in 1..ATTRIBUTES_PER_VM {
        assert_eq!(mailbox.set_attribute(&format!("n{}", n % 7), &format!("k{n}"), b"v"), Ok(true));
    }
    assert_eq!(mailbox.set_attribute("n", "one-more", b"v"), Err(AttributeRefused::Full));
    assert_eq!(mailbox.set_attribute("n1", "k1", b"new"), Ok(true), "a replaced attribute counts once");
    assert!(mailbox.delete_attribute("n1", "k1"));
    assert_eq!(mailbox.set_attribute("n", "one-more", b"v"), Ok(true));
}

#[test]
fn a_shorter_attribute_makes_room_below_the_total_limit() {
    let mailbox = mailbox();
    let value = vec![b'v'; ATTRIBUTE_BYTES - 2];
    for n in 0..ATTRIBUTES_BYTES_PER_VM / ATTRIBUTE_BYTES {
        assert_eq!(mailbox.set_attribute("n", &n.to_string(), &value), Ok(true), "{n}");
    }
    assert_eq!(mailbox.set_attribute("n", "8", b""), Err(AttributeRefused::TooMuch));
    assert_eq!(mailbox.set_attribute("n", "0", &value[..9]), Ok(true));
    assert_eq!(mailbox.set_attribute("n", "8", b""), Ok(true));
    assert_eq!(mailbox.set_attribute("n", "0", &value), Err(AttributeRefused::TooMuch));
}

#[test]
fn documents_are_separate_and_within_their_size_limit() {
    let mailbox = mailbox();
    assert_eq!(mailbox.document(EveDocument::Kubeconfig), None);
    let largest = vec![b'k'; DOCUMENT_BYTES];
    assert_eq!(mailbox.store_document(EveDocument::Kubeconfig, &largest), Ok(()));
    let larger = vec![b'k'; DOCUMENT_BYTES + 1];
    assert_eq!(mailbox.store_document(EveDocument::Kubeconfig, &larger), Err(DocumentTooLarge));
    assert_eq!(mailbox.document(EveDocument::Kubeconfig).as_deref(), Some(largest.as_slice()));
    assert_eq!(mailbox.document(EveDocument::AppCustomStatus), None);
}

#[test]
fn a_parked_request_beyond_the_limit_ends_the_oldest() {
    let outbox = Outbox::detached();
    let mailbox = Mailbox::new(UUID, &outbox);
    let mut waits: Vec<_> = (0..WAITS_PER_VM).map(|_| mailbox.wait()).collect();
    assert!(waits.iter().all(|wait| !wait.is_ended()));
    drop(waits.remove(3));
    waits.push(mailbox.wait());
    assert!(waits.iter().all(|wait| !wait.is_ended()), "a dropped request did not free its place");
    waits.push(mailbox.wait());
    let ended: Vec<_> = waits.iter().map(|wait| wait.is_ended()).collect();
    assert_eq!(ended.iter().position(|ended| *ended), Some(0));
    assert_eq!(ended.iter().filter(|ended| **ended).count(), 1);
    assert_eq!(outbox.counts().waits_ended, 1);
}

/// Sets one of everything.
fn fill(mailbox: &Mailbox) {
    mailbox.note_record("web", Some("secret"));
    mailbox.take_password();
    mailbox.post_password(b"posted").expect("the first");
    mailbox.set_attribute("ns", "key", &[0, 255]).expect("small");
    mailbox.store_document(EveDocument::AppCustomStatus, b"{}").expect("small");
}

#[test]
fn debug_output_contains_nothing_the_guest_wrote() {
    let mailbox = mailbox();
    fill(&mailbox);
    let shown = format!("{mailbox:?}");
    assert!(shown.contains(UUID) && !shown.contains("posted") && !shown.contains("secret"), "{shown}");
}

fn assert_empty(mailbox: &Mailbox, case: &str) {
    assert!(!mailbox.password_taken(), "{case}");
    assert_eq!(mailbox.posted_password(), "", "{case}");
    assert_eq!(mailbox.attributes(), [], "{case}");
    assert_eq!(mailbox.document(EveDocument::AppCustomStatus), None, "{case}");
}

#[test]
fn what_a_guest_wrote_belongs_to_one_instance_id() {
    let mailbox = mailbox();
    assert!(!mailbox.note_instance("first"));
    fill(&mailbox);
    let version = mailbox.attributes_version();
    assert!(!mailbox.note_instance("first"), "the record changed in another field");
    assert_eq!(mailbox.posted_password(), "posted");
    for next in ["second", "first"] {
        assert!(mailbox.note_instance(next), "{next}");
        assert_empty(&mailbox, next);
        assert_eq!(mailbox.post_password(b"posted"), Ok(()), "{next}");
    }
    assert!(mailbox.attributes_version() > version, "a waiting request would miss the removal");
}

#[test]
fn an_operator_clears_what_the_guest_wrote_and_it_may_write_again() {
    let mailbox = mailbox();
    assert!(!mailbox.clear(), "there is nothing yet");
    mailbox.note_instance("first");
    fill(&mailbox);
    assert!(mailbox.clear());
    assert_empty(&mailbox, "cleared");
    fill(&mailbox);
    assert_eq!(mailbox.posted_password(), "posted");
}
