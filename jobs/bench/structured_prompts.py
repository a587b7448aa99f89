"""Schema-heavy requests: forms of many keys and enums, as information is extracted into, and a text for each.

schema, request = TASKS[0]
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def form(**properties: Any) -> Schema:
    """An object of these keys and no others, in this order."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text(longest: int = 40) -> Schema:
    return {"type": "string", "maxLength": longest}


def number(low: int = 0, high: int = 10_000) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def some(items: Schema, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


DATE = {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"}
YES = {"type": "boolean"}

PERSON = form(
    first_name=text(20),
    last_name=text(20),
    age_in_years=number(0, 120),
    marital_status=one_of("single", "married", "divorced", "widowed"),
    employment=form(job_title=text(30), employer_name=text(30), is_full_time=YES),
    preferred_contact_method=one_of("email", "telephone", "letter"),
)
ORDER = form(
    order_number=number(),
    customer_name=text(30),
    shipping_address=form(
        street=text(30),
        city=text(20),
        postal_code=text(10),
        country_code=one_of("US", "DE", "FR", "GB"),
    ),
    line_items=some(
        form(product_name=text(30), quantity=number(1, 99), unit_price_in_cents=number())
    ),
    payment_method=one_of("credit_card", "bank_transfer", "cash_on_delivery"),
    is_gift=YES,
)
REVIEW = form(
    product_category=one_of("electronics", "clothing", "books", "household", "other"),
    overall_sentiment=one_of("very_negative", "negative", "neutral", "positive", "very_positive"),
    star_rating=number(1, 5),
    mentioned_aspects=some(
        form(aspect_name=text(20), aspect_sentiment=one_of("negative", "neutral", "positive"))
    ),
    would_recommend=YES,
    requires_follow_up=YES,
)
EVENT = form(
    event_title=text(40),
    event_type=one_of("meeting", "conference", "birthday", "concert", "workshop"),
    start_date=DATE,
    end_date=DATE,
    location=form(venue_name=text(30), city=text(20), is_online=YES),
    expected_participants=number(1, 5000),
    requires_registration=YES,
)
RECIPE = form(
    recipe_name=text(30),
    difficulty_level=one_of("easy", "medium", "hard"),
    preparation_time_in_minutes=number(1, 240),
    ingredients=some(
        form(
            ingredient_name=text(20),
            amount=number(1, 1000),
            unit_of_measure=one_of("g", "ml", "piece", "tablespoon"),
        )
    ),
    is_vegetarian=YES,
    number_of_servings=number(1, 12),
)
TICKET = form(
    ticket_category=one_of("billing", "technical_issue", "account_access", "feature_request"),
    priority_level=one_of("low", "medium", "high", "critical"),
    affected_product=text(30),
    short_description=text(60),
    customer_is_upset=YES,
    suggested_department=one_of("support", "sales", "engineering", "finance"),
    estimated_resolution_in_hours=number(1, 100),
)
WEATHER = form(
    location_name=text(30),
    temperature_in_celsius=number(-60, 60),
    precipitation_type=one_of("none", "rain", "snow", "hail"),
    wind_direction=one_of("north", "east", "south", "west"),
    wind_speed_in_km_per_hour=number(0, 300),
    forecast_for_next_days=some(
        form(
            day_of_week=one_of("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"),
            maximum_temperature=number(-60, 60),
        )
    ),
    warning_issued=YES,
)
VEHICLE = form(
    manufacturer=text(20),
    model_name=text(20),
    year_of_manufacture=number(1900, 2030),
    fuel_type=one_of("petrol", "diesel", "electric", "hybrid"),
    transmission=one_of("manual", "automatic"),
    mileage_in_kilometres=number(0, 900_000),
    previous_owners=number(0, 10),
    has_service_history=YES,
)
COUNTRY = form(
    country_name=text(30),
    capital_city=text(30),
    continent=one_of("Africa", "Asia", "Europe", "North America", "South America", "Oceania"),
    official_languages=some(text(20)),
    population_in_millions=number(0, 1500),
    is_member_of_the_united_nations=YES,
    government_type=one_of("republic", "monarchy", "federation", "other"),
)
JOB = form(
    position_title=text(40),
    company_name=text(30),
    employment_type=one_of("full_time", "part_time", "contract", "internship"),
    minimum_years_of_experience=number(0, 30),
    required_skills=some(
        form(skill_name=text(20), proficiency_level=one_of("beginner", "intermediate", "expert"))
    ),
    remote_work_allowed=YES,
    annual_salary_in_dollars=number(0, 500_000),
)

TASKS: list[tuple[Schema, str]] = [
    (
        PERSON,
        "Maria Lopez, 34, is married and works full time as a nurse at St. Mary's Hospital. She prefers email.",
    ),
    (
        PERSON,
        "John Smith is a retired teacher of 71 years. He is widowed and likes to be called by telephone.",
    ),
    (
        ORDER,
        "Anna Weber from Berlin orders two lamps at 29.90 each and one desk for 149 dollars, paid by card.",
    ),
    (
        ORDER,
        "Please send three books to Paul Martin, 12 Rue de Lyon, Paris, as a gift. He pays on delivery.",
    ),
    (
        REVIEW,
        "This phone is great: the camera is sharp and the battery lasts two days. I would buy it again.",
    ),
    (REVIEW, "The jacket tore after one week, and my mail got no answer. Never again!"),
    (
        EVENT,
        "The Python workshop takes place on May 3rd 2026 in the Town Hall of Leeds; 80 people are expected.",
    ),
    (
        EVENT,
        "Join our online birthday party for Grandma on 12 July 2026. All 25 of us will be there.",
    ),
    (
        RECIPE,
        "Pancakes for four: mix 200 g flour, 300 ml milk and two eggs, and fry them. It takes 20 minutes.",
    ),
    (
        RECIPE,
        "A simple tomato soup: 500 g tomatoes, one onion, two tablespoons of oil. Ready in half an hour.",
    ),
    (TICKET, "I was charged twice for my subscription this month! I want my money back at once."),
    (
        TICKET,
        "The app crashes whenever I open the settings page on my tablet. Could you have a look?",
    ),
    (
        WEATHER,
        "Tomorrow in Oslo: snow at -5 degrees, strong wind from the north with 60 km/h. Tuesday -3, Wednesday 0.",
    ),
    (
        WEATHER,
        "Sunny and 28 degrees in Rome with a light breeze from the west. It stays warm until Friday.",
    ),
    (
        VEHICLE,
        "For sale: a Toyota Corolla hybrid of 2019, automatic, 45,000 km, one owner, serviced every year.",
    ),
    (
        VEHICLE,
        "Old Volkswagen Golf diesel, built 2004, manual gearbox, 230,000 km, three owners, no papers.",
    ),
    (COUNTRY, "Tell me about Japan."),
    (COUNTRY, "Tell me about Brazil."),
    (
        JOB,
        "Acme Robotics seeks a senior Python engineer with five years of experience, remote, for 150,000 dollars.",
    ),
    (
        JOB,
        "Summer internship in the kitchen of the Grand Hotel; no experience needed, some knowledge of French.",
    ),
]
