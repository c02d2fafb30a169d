//! Tests that page and image are well-formed and self-contained for any results, and name every subject.

use roxmltree::{Document, ParsingOptions};

use super::{html, memory, number, share, svg, time};
use crate::storm::cpu::{
    Case, Cpu, Distribution, Environment, Memory, Results, Round, SCHEMA, Settings, Subject,
};
use crate::storm::figure::Figure;

fn round(vms: u32, us: f64) -> Round {
    let requests = u64::from(vms) * 4;
    let buckets = (0..40).map(|n| (us * 1.1_f64.powi(n), requests / 40 + u64::from(n == 0))).collect();
    let times = Distribution { buckets, max_us: us * 42.0 };
    // Long enough for the resolution of the clocks.
    let used = us * requests as f64;
    let busy = used * 100.0;
    Round {
        requests,
        wall_us: used,
        cpu: Cpu {
            server_user_us: busy * 0.2,
            server_system_us: busy * 0.3,
            generator_us: busy * 0.2,
            busy_us: busy,
            ..Cpu::default()
        },
        request: times.clone(),
        boot: times,
        finished: (1..=vms).map(|n| (us * f64::from(n), n)).collect(),
        memory: Memory { server_bytes: 1 << 24, kernel_bytes: Some(u64::from(vms) << 12) },
        ready_us: 50.0 * f64::from(vms),
        attach_us: Some(20.0 * f64::from(vms)),
        ..Round::default()
    }
}

const SUBJECTS: [(&str, f64); 4] = [("xdp-imds", 7.0), ("nginx", 38.0), ("haproxy", 35.0), ("neutron", 90.0)];

fn case(vms: u32, rounds: usize) -> Case {
    let subject =
        |&(name, us): &(&str, f64)| Subject { name: name.into(), rounds: vec![round(vms, us); rounds] };
    let settings = Settings {
        dialect: "nocloud".into(),
        vms,
        user_data_bytes: 300,
        requests_per_boot: 4,
        ..Settings::default()
    };
    Case { settings, subjects: SUBJECTS.iter().map(subject).collect() }
}

fn results(cases: Vec<Case>) -> Results {
    let environment =
        Environment { kernel: "Linux 6.18".into(), commit: "abc".into(), cores: 2, ..Environment::default() };
    Results { schema: SCHEMA.into(), environment, cases }
}

/// Returns the page and the image, after parsing both. Only the page has a document type.
fn rendered(results: &Results) -> [String; 2] {
    let both = [html(results), svg(results)];
    for text in &both {
        let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
        if let Err(error) = Document::parse_with_options(text, options) {
            panic!("not well-formed: {error}\n{text}");
        }
        for wrong in ["NaN", "inf", "<script", "href", "src=", "url("] {
            assert!(!text.contains(wrong), "{wrong} in {text}");
        }
    }
    both
}

#[test]
fn page_and_image_are_well_formed_for_any_results() {
    let without_subjects = Case { subjects: Vec::new(), ..case(10, 1) };
    let without_rounds = case(10, 0);
    let mut of_nothing = case(1, 2);
    for subject in &mut of_nothing.subjects {
        subject.rounds = vec![Round::default(); 2];
    }
    let mut broken = case(10, 3);
    for round in broken.subjects.iter_mut().flat_map(|subject| &mut subject.rounds) {
        round.wall_us = f64::NAN;
        round.cpu.busy_us = f64::INFINITY;
        round.finished = vec![(f64::NAN, 3)];
        round.request = Distribution { buckets: vec![(0.0, 1), (f64::INFINITY, 2)], max_us: f64::INFINITY };
    }
    for (name, cases) in [
        ("no case", vec![]),
        ("no subject", vec![without_subjects]),
        ("no round", vec![without_rounds]),
        ("rounds of nothing", vec![of_nothing]),
        ("figures that are not numbers", vec![broken]),
        ("one round of one VM", vec![case(1, 1)]),
        ("many", vec![case(100, 5), case(1_000, 3), case(4_000, 2)]),
    ] {
        eprintln!("{name}");
        rendered(&results(cases));
    }
}

#[test]
fn every_drawing_names_every_subject() {
    let results = results(vec![case(100, 3), case(1_000, 3)]);
    let text = html(&results);
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    let page = Document::parse_with_options(&text, options).expect("well-formed");
    let figures: Vec<_> =
        page.descendants().filter(|node| node.has_tag_name(("http://www.w3.org/2000/svg", "svg"))).collect();
    // Four drawings for each case, and one for memory.
    assert_eq!(figures.len(), 9);
    for figure in figures {
        let words: String = figure.descendants().filter_map(|node| node.text()).collect();
        for (name, _) in SUBJECTS {
            assert!(words.contains(name), "{name} is missing from {:?}", figure.attribute("aria-label"));
        }
    }
}

#[test]
fn table_and_chart_show_the_same_cost_and_say_which_rounds_it_leaves_out() {
    let mut case = case(100, 4);
    for (number, round) in case.subjects[0].rounds.iter_mut().enumerate() {
        round.cpu.busy_us *= 1.0 + number as f64;
        round.cpu.generator_us = 0.0;
    }
    // A round that is too short, with which the middle would be elsewhere.
    case.subjects[0].rounds[3].cpu.busy_us = 1.0;
    let settings = case.settings.clone();
    let median =
        Figure::named("host CPU / request").spread(&case.subjects[0], &settings).expect("a median").median;
    let name = format!("xdp-imds: {} without the generator", time(median));
    let table = crate::storm::figure::text(&results(vec![case.clone()]));
    assert!(table.contains(&time(median)), "{table}");
    for text in rendered(&results(vec![case])).into_iter().chain([table]) {
        assert!(text.contains("1 of 4 rounds"), "{text}");
        assert!(text.contains(&name) || !text.contains("<svg"), "{name} is missing from {text}");
    }
}

#[test]
fn names_and_reasons_that_look_like_markup_stay_text() {
    let mut case = case(10, 1);
    case.subjects[0].name = "<b>&\"".into();
    case.subjects[0].rounds[0].reasons.insert("expected <html> & got \u{0}".into(), 3);
    let [page, _] = rendered(&results(vec![case]));
    assert!(page.contains("&lt;b&gt;&amp;") && page.contains("expected &lt;html&gt; &amp; got \u{fffd}"));
}

#[test]
fn ratios_and_failures_are_described_in_words() {
    let mut case = case(1_000, 3);
    let page = html(&results(vec![case.clone()]));
    assert!(page.contains("None of 12,000 requests failed."), "{page}");
    assert!(page.contains("5.4 times less than with nginx"), "{page}");
    case.subjects[0].rounds[0].failures = 2;
    case.subjects[1].rounds[0].failures = 7;
    let page = html(&results(vec![case]));
    assert!(page.contains("2 of 12,002 requests FAILED; with nginx 7 did."), "{page}");
}

#[test]
fn quantities_have_three_digits_and_a_unit() {
    assert_eq!(number(7.0), "7");
    assert_eq!(number(0.012_34), "0.0123");
    assert_eq!(number(1_234.5), "1234");
    assert_eq!(number(1_234_567.0), "1,234,567");
    assert_eq!(number(f64::NAN), "–");
    assert_eq!(time(430.0), "430 µs");
    assert_eq!(time(999.7), "1 ms");
    assert_eq!(time(1_250_000.0), "1.25 s");
    assert_eq!(memory(16_384.0), "16 KiB");
    assert_eq!(memory(3.5e9), "3.26 GiB");
    assert_eq!(share(0.999), "99.9 %");
    assert_eq!(share(0.0), "0 %");
}
