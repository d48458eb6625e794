//! A line chart as an SVG: categories from left to right, numbers from the bottom up, a legend at the right.

use std::fmt::Write;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 300.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 60.0;
/// Told apart by most people who see colours differently as well.
const COLOURS: [&str; 9] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#8c564b", "#3c3c3c"];

/// One value, and how far it varied.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    pub(super) value: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

#[derive(Debug)]
pub(super) struct Series {
    pub(super) name: String,
    /// A point a category, where there is one.
    pub(super) points: Vec<Option<Point>>,
    /// Drawn as a border that the others are below, not as one of them.
    pub(super) ceiling: bool,
}

#[derive(Debug)]
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) subtitle: String,
    pub(super) x_title: String,
    pub(super) y_title: String,
    pub(super) categories: Vec<String>,
    pub(super) series: Vec<Series>,
    /// Powers of ten at equal distances.
    pub(super) logarithmic: bool,
}

/// How values become heights.
struct Axis {
    min: f64,
    max: f64,
    logarithmic: bool,
    ticks: Vec<f64>,
}

impl Chart {
    /// `None` if there is nothing to draw.
    pub(super) fn svg(&self) -> Option<String> {
        let points = || self.series.iter().flat_map(|series| series.points.iter().flatten());
        let max = points().map(|point| point.high).reduce(f64::max)?;
        let min = points().map(|point| point.low).reduce(f64::min)?;
        let axis = if self.logarithmic { Axis::logarithmic(min, max) } else { Axis::linear(max) };
        let mut svg = String::new();
        self.frame(&mut svg, &axis);
        let mut colours = COLOURS.iter().cycle();
        let mut line = 0;
        for series in &self.series {
            let colour = if series.ceiling { "#111111" } else { colours.next().unwrap_or(&"#000000") };
            self.draw(&mut svg, series, colour, &axis);
            line += legend(&mut svg, line, series, colour);
        }
        svg.push_str("</svg>\n");
        Some(svg)
    }

    fn x(&self, category: usize) -> f64 {
        let width = WIDTH - LEFT - RIGHT;
        LEFT + width * (category as f64 + 0.5) / self.categories.len() as f64
    }

    fn frame(&self, svg: &mut String, axis: &Axis) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let _ = writeln!(
            svg,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{INK}">
<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>"#
        );
        text(svg, LEFT, 24.0, r#"font-size="17" font-weight="bold""#, &self.title);
        text(svg, LEFT, 43.0, r##"fill="#666666""##, &self.subtitle);
        for &tick in &axis.ticks {
            let y = axis.y(tick);
            let _ = writeln!(svg, r##"<path d="M{LEFT} {y:.1}H{right}" stroke="#e4e4e4"/>"##);
            text(svg, LEFT - 8.0, y + 4.5, r#"text-anchor="end""#, &number(tick));
        }
        let _ = writeln!(svg, r##"<path d="M{LEFT} {TOP}V{bottom}H{right}" stroke="#888888" fill="none"/>"##);
        for (index, category) in self.categories.iter().enumerate() {
            text(svg, self.x(index), bottom + 20.0, MIDDLE, category);
        }
        text(svg, f64::midpoint(LEFT, right), bottom + 44.0, MIDDLE, &self.x_title);
        let middle = f64::midpoint(TOP, bottom);
        let turned = format!(r#"text-anchor="middle" transform="rotate(-90 20 {middle})""#);
        text(svg, 20.0, middle, &turned, &self.y_title);
    }

    fn draw(&self, svg: &mut String, series: &Series, colour: &str, axis: &Axis) {
        let drawn: Vec<_> = series
            .points
            .iter()
            .enumerate()
            .filter_map(|(index, point)| point.map(|point| (self.x(index), point)))
            .collect();
        let mut path = String::new();
        for (index, (x, point)) in drawn.iter().enumerate() {
            let _ = write!(path, "{}{x:.1} {:.1}", if index == 0 { 'M' } else { 'L' }, axis.y(point.value));
        }
        if series.ceiling
            && let (Some((first, _)), Some((last, _))) = (drawn.first(), drawn.last())
        {
            let _ = writeln!(
                svg,
                r##"<path d="{path}L{last:.1} {TOP}H{first:.1}Z" fill="#f2f2f2" stroke="none"/>"##
            );
        }
        let dash = if series.ceiling { r#" stroke-dasharray="7 4""# } else { "" };
        let _ = writeln!(svg, r#"<path d="{path}" stroke="{colour}" stroke-width="2" fill="none"{dash}/>"#);
        for (x, point) in drawn {
            let (y, low, high) = (axis.y(point.value), axis.y(point.low), axis.y(point.high));
            if low - high > 1.0 {
                let _ = writeln!(
                    svg,
                    r#"<path d="M{x:.1} {low:.1}V{high:.1}M{left:.1} {low:.1}h8M{left:.1} {high:.1}h8" stroke="{colour}" fill="none"/>"#,
                    left = x - 4.0,
                );
            }
            let _ = writeln!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3.5" fill="{colour}"/>"#);
        }
    }
}

const INK: &str = "#222222";
const PAPER: &str = "#ffffff";
const MIDDLE: &str = r#"text-anchor="middle""#;
/// Heights and characters of a line of the legend.
const LEGEND_LINE: f64 = 18.0;
const LEGEND_WIDTH: usize = 38;

/// Writes a series' name from a line of the legend on, and returns the lines that it takes.
fn legend(svg: &mut String, line: usize, series: &Series, colour: &str) -> usize {
    let (x, y) = (WIDTH - RIGHT + 20.0, TOP + 12.0 + LEGEND_LINE * line as f64);
    let dash = if series.ceiling { r#" stroke-dasharray="7 4""# } else { "" };
    let _ = writeln!(svg, r#"<path d="M{x} {y}h26" stroke="{colour}" stroke-width="2"{dash}/>"#);
    if !series.ceiling {
        let _ = writeln!(svg, r#"<circle cx="{}" cy="{y}" r="3.5" fill="{colour}"/>"#, x + 13.0);
    }
    let lines = wrapped(&series.name);
    for (index, part) in lines.iter().enumerate() {
        text(svg, x + 34.0, y + 4.5 + LEGEND_LINE * index as f64, r#"font-size="12""#, part);
    }
    lines.len()
}

/// A name in lines that the legend has room for, broken after its words.
fn wrapped(name: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in name.split_inclusive(' ') {
        let line = lines.len() - 1;
        if !lines[line].is_empty() && lines[line].len() + word.trim_end().len() > LEGEND_WIDTH {
            lines.push(String::new());
        }
        lines.last_mut().expect("there is one from the beginning").push_str(word);
    }
    lines
}

fn text(svg: &mut String, x: f64, y: f64, attributes: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" {attributes}>{text}</text>"#);
}

impl Axis {
    /// From zero to a round number, five steps or so.
    fn linear(max: f64) -> Self {
        let rough = max.max(f64::MIN_POSITIVE) / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let step =
            [1.0, 2.0, 2.5, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|&step| step >= rough);
        let step = step.unwrap_or(rough);
        let count = (max / step).ceil().max(1.0) as u32;
        let ticks = (0..=count).map(|index| f64::from(index) * step).collect();
        Self { min: 0.0, max: f64::from(count) * step, logarithmic: false, ticks }
    }

    /// Whole decades, and the twos and fives in them if there are few.
    fn logarithmic(min: f64, max: f64) -> Self {
        let first = min.max(1e-6).log10().floor() as i32;
        let last = (max.max(1e-6).log10().ceil() as i32).max(first + 1);
        let factors: &[f64] = if last - first <= 3 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let (min, max) = (10f64.powi(first), 10f64.powi(last));
        let ticks = (first..=last)
            .flat_map(|decade| factors.iter().map(move |factor| factor * 10f64.powi(decade)))
            .filter(|&tick| tick <= max * 1.0001)
            .collect();
        Self { min, max, logarithmic: true, ticks }
    }

    fn y(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.logarithmic { value.max(self.min).log10() } else { value };
        let share = (scale(value) - scale(self.min)) / (scale(self.max) - scale(self.min));
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }
}

/// With a separator a thousand, and no more decimals than it has.
pub(super) fn number(value: f64) -> String {
    if value < 1000.0 {
        let rounded = format!("{value:.3}");
        return rounded.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    let digits = format!("{value:.0}");
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_reach_their_largest_value_in_round_steps() {
        let axis = Axis::linear(3806.0);
        assert_eq!(axis.ticks, [0.0, 1000.0, 2000.0, 3000.0, 4000.0]);
        assert!((axis.y(4000.0) - TOP).abs() < 1e-9 && (axis.y(0.0) - (HEIGHT - BOTTOM)).abs() < 1e-9);
        let axis = Axis::logarithmic(0.4, 30.0);
        assert_eq!((axis.min, axis.max), (0.1, 100.0));
        assert!((axis.y(100.0) - TOP).abs() < 1e-9);
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(number(1_234_567.0), "1,234,567");
        assert_eq!(number(1000.0), "1,000");
        assert_eq!(number(2.5), "2.5");
        assert_eq!(number(0.0), "0");
    }

    #[test]
    fn long_names_are_broken_between_words() {
        assert_eq!(wrapped("c_engine_threaded"), ["c_engine_threaded"]);
        let lines = wrapped("c_engine_threaded (logprobs true, temperature 0.7, penalty 1.1)");
        assert_eq!(lines, ["c_engine_threaded (logprobs true, ", "temperature 0.7, penalty 1.1)"]);
        assert_eq!(wrapped(&"x".repeat(60)), ["x".repeat(60)], "a word is never broken");
    }

    #[test]
    fn a_chart_of_nothing_is_none_and_names_are_escaped() {
        let mut chart = Chart {
            title: "a < b & c".to_owned(),
            subtitle: String::new(),
            x_title: String::new(),
            y_title: String::new(),
            categories: vec!["1".to_owned()],
            series: Vec::new(),
            logarithmic: false,
        };
        assert!(chart.svg().is_none());
        let point = Point { value: 2.0, low: 1.0, high: 3.0 };
        chart.series.push(Series { name: "s".to_owned(), points: vec![Some(point)], ceiling: false });
        let svg = chart.svg().expect("there is a point");
        assert!(svg.contains("a &lt; b &amp; c") && svg.ends_with("</svg>\n"), "{svg}");
    }
}
