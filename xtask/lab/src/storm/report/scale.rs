//! Maps values to places on an axis, and chooses the marks along it.

/// How values are mapped to an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scale {
    /// Equal steps from 0.
    Linear {
        /// The value at the far end.
        max: f64,
        /// The distance between marks.
        step: f64,
    },
    /// Equal lengths for each factor of ten. Values below `min` are drawn at `min`.
    Log {
        /// The value at the near end, above 0.
        min: f64,
        /// The value at the far end.
        max: f64,
    },
    /// Fractions from 0 to 1, spaced by their distance from 1. The range from 0 to 90 % is as long as the one from 90
    /// to 99 %, so that tails are visible.
    Tail {
        /// Number of nines at the far end.
        nines: u8,
    },
}

/// The most marks on a linear axis.
const LINEAR_MARKS: f64 = 6.0;
/// The most powers of ten on a logarithmic axis. Lower values are drawn at the near end.
const MAX_DECADES: f64 = 9.0;

impl Scale {
    /// Returns an axis with equal steps for all `values`.
    pub(crate) fn linear(values: impl Iterator<Item = f64>) -> Self {
        Self::even(values, |_| 1.0)
    }

    /// Returns an axis with equal steps, round in KiB, MiB or GiB, for all `bytes`.
    pub(crate) fn binary(bytes: impl Iterator<Item = f64>) -> Self {
        Self::even(bytes, |max| {
            let units = [30, 20, 10].map(|power| 2_f64.powi(power));
            units.into_iter().find(|unit| max >= *unit).unwrap_or(1.0)
        })
    }

    fn even(values: impl Iterator<Item = f64>, unit: fn(f64) -> f64) -> Self {
        let max = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
        if max <= 0.0 {
            return Self::Linear { max: 1.0, step: 1.0 };
        }
        let unit = unit(max);
        let step = round_up(max / unit / LINEAR_MARKS) * unit;
        Self::Linear { max: (max / step - 1e-9).ceil() * step, step }
    }

    /// Returns a logarithmic axis with ends at 1, 2 or 5 times a power of ten, for all `values` above 0.
    pub(crate) fn log(values: impl Iterator<Item = f64> + Clone) -> Self {
        let values = values.filter(|value| value.is_finite() && *value > 0.0);
        let (low, high) = values
            .fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), value| (low.min(value), high.max(value)));
        if high == 0.0 {
            return Self::Log { min: 1.0, max: 10.0 };
        }
        let low = low.max(high / 10_f64.powf(MAX_DECADES));
        let (min, max) = (round_down(low), round_up(high));
        // The axis needs some length even for a single value.
        if max / min < 5.0 { Self::Log { min: min / 2.0, max: max * 2.0 } } else { Self::Log { min, max } }
    }

    /// Returns the place of a value, from 0 at the near end to 1 at the far end.
    pub(crate) fn place(self, value: f64) -> f64 {
        let place = match self {
            Self::Linear { max, .. } => value / max,
            Self::Log { min, max } => (value.max(min) / min).ln() / (max / min).ln(),
            Self::Tail { nines } => {
                let left = (1.0 - value).max(10_f64.powi(-i32::from(nines)));
                -left.log10() / f64::from(nines)
            }
        };
        if place.is_nan() { 0.0 } else { place.clamp(0.0, 1.0) }
    }

    /// Returns the values of the marks, from the near end to the far end.
    pub(crate) fn marks(self) -> Vec<f64> {
        match self {
            Self::Linear { max, step } => {
                let count = (max / step + 1e-9).floor() as u32;
                (0..=count).map(|n| f64::from(n) * step).collect()
            }
            Self::Log { min, max } => log_marks(min, max),
            Self::Tail { nines } => {
                let nines = (1..=i32::from(nines)).map(|nines| 1.0 - 10_f64.powi(-nines));
                [0.0, 0.5].into_iter().chain(nines).collect()
            }
        }
    }
}

fn log_marks(min: f64, max: f64) -> Vec<f64> {
    let decades = (max / min).log10();
    let multiples: &[f64] = if decades <= 3.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let (first, last) = (min.log10().floor() as i32, max.log10().ceil() as i32);
    let all = (first..=last).flat_map(|power| multiples.iter().map(move |m| m * 10_f64.powi(power)));
    all.filter(|mark| (min * 0.999..=max * 1.001).contains(mark)).collect()
}

fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let multiple = [1.0, 2.0, 5.0].into_iter().find(|m| m * power >= value * (1.0 - 1e-9));
    multiple.unwrap_or(10.0) * power
}

fn round_down(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let multiple = [5.0, 2.0, 1.0].into_iter().find(|m| m * power <= value * (1.0 + 1e-9));
    multiple.unwrap_or(1.0) * power
}

#[cfg(test)]
mod tests {
    use super::Scale;

    #[test]
    fn every_value_is_on_its_axis() {
        for values in [vec![], vec![0.0], vec![3.7], vec![f64::NAN, 1e-9, 12.0], vec![0.001, 5_000_000.0]] {
            let all = || values.iter().copied();
            for scale in [Scale::linear(all()), Scale::binary(all()), Scale::log(all())] {
                for &value in &values {
                    let place = scale.place(value);
                    assert!((0.0..=1.0).contains(&place), "{value} in {scale:?}: {place}");
                }
                let marks = scale.marks();
                assert!((2..40).contains(&marks.len()), "{scale:?}: {marks:?}");
                assert!(marks.is_sorted(), "{marks:?}");
            }
        }
    }

    #[test]
    fn marks_are_round_numbers() {
        let marks = Scale::linear([37.2].into_iter()).marks();
        assert_eq!(marks, [0.0, 10.0, 20.0, 30.0, 40.0]);
        let mib = f64::from(1 << 20);
        assert_eq!(Scale::binary([4.3 * mib].into_iter()), Scale::Linear { max: 5.0 * mib, step: mib });
        assert_eq!(Scale::log([12.0, 900.0].into_iter()), Scale::Log { min: 10.0, max: 1_000.0 });
    }

    #[test]
    fn each_nine_of_a_tail_has_the_same_length() {
        let scale = Scale::Tail { nines: 4 };
        for (share, place) in [(0.0, 0.0), (0.9, 0.25), (0.99, 0.5), (0.999, 0.75), (1.0, 1.0)] {
            assert!((scale.place(share) - place).abs() < 1e-9, "{share}");
        }
    }
}
