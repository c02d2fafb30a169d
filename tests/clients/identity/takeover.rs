//! Tokens while one agent takes over from another.

use std::sync::atomic::{AtomicBool, Ordering};

use support::libraries::Libraries;

use super::OLD;
use super::scene::{AUDIENCE, PATIENCE, Scene, make_key};

#[test]
fn guests_get_tokens_all_through_a_takeover() {
    let Some(libraries) = Libraries::or_skip() else { return };
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let first = scene.agent("algorithm: ES256", &[]);
    let before = scene.token(0, AUDIENCE);
    let is_over = AtomicBool::new(false);
    let (next, statuses) = std::thread::scope(|scope| {
        let asks = scope.spawn(|| {
            let mut statuses = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                statuses.push(scene.ask(1, &["-H", "Metadata: true"], "?audience=during").0);
            }
            statuses
        });
        let next = scene.agent("algorithm: ES256", &["--takeover"]);
        let (status, log) = first.ended(PATIENCE).expect("the first agent ends");
        assert!(status.success(), "{log}");
        is_over.store(true, Ordering::Relaxed);
        (next, asks.join().expect("no panic"))
    });
    assert!(!statuses.is_empty() && statuses.iter().all(|status| *status == 200), "{statuses:?}");
    let after = scene.token(0, AUDIENCE);
    let found = scene.verify(libraries, &next, &[(&before, AUDIENCE), (&after, AUDIENCE)]);
    // The first may have ended meanwhile, by its lifetime.
    assert!(found[0].is_object() || found[0] == "ExpiredSignatureError", "{found:?}");
    assert!(found[1].is_object(), "{found:?}");
}
